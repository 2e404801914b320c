// Downloads over http and https (libcurl).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace jetlag {

struct DownloadLimits {
    uint64_t max_bytes = uint64_t{1} << 30;
    long connect_seconds = 30;  // to reach the server
    long stall_seconds = 30;    // without a byte before giving up
};

// True for "http://..." and "https://...", in any case.
bool is_web_address(std::string_view text);

// The body that the server sends for the address, whole. Follows up to 10 redirects (from https only to https) and
// verifies certificates. On a terminal the progress is shown on stderr while it runs.
// Errors name the address and the reason: no network, a refused connection, a status other than 200, a body that ends
// early, a stall, more than max_bytes, an empty body.
std::string download(const std::string& address, const DownloadLimits& limits = {});

}  // namespace jetlag
