#include "src/download.h"

#include <curl/curl.h>
#include <strings.h>
#include <unistd.h>

#include <memory>

#include "src/error.h"

namespace jetlag {

namespace {

struct Transfer {
    std::string address;
    std::string body;
    uint64_t max_bytes;
    bool too_large = false;
    bool show_progress;
    int64_t shown_kilobytes = -1;
};

size_t on_data(char* data, size_t size, size_t count, void* user) {
    Transfer& transfer = *static_cast<Transfer*>(user);
    const size_t bytes = size * count;
    if (bytes > transfer.max_bytes - transfer.body.size()) {
        transfer.too_large = true;
        return 0;
    }
    transfer.body.append(data, bytes);
    return bytes;
}

int on_progress(void* user, curl_off_t total, curl_off_t now, curl_off_t, curl_off_t) {
    Transfer& transfer = *static_cast<Transfer*>(user);
    const int64_t kilobytes = now / 1000;
    if (!transfer.show_progress || kilobytes == transfer.shown_kilobytes) return 0;
    transfer.shown_kilobytes = kilobytes;
    if (total > 0) {
        print_note("\r{}: {} of {} kB ({}%) ", transfer.address, kilobytes, total / 1000, now * 100 / total);
    } else {
        print_note("\r{}: {} kB ", transfer.address, kilobytes);
    }
    return 0;
}

template <typename Value>
void set(CURL* curl, CURLoption option, Value value) {
    const CURLcode code = curl_easy_setopt(curl, option, value);
    if (code != CURLE_OK) fail("libcurl refuses option {}: {}", static_cast<int>(option), curl_easy_strerror(code));
}

}  // namespace

bool is_web_address(std::string_view text) {
    const std::string start(text.substr(0, 8));
    return strncasecmp(start.c_str(), "http://", 7) == 0 || strncasecmp(start.c_str(), "https://", 8) == 0;
}

std::string download(const std::string& address, const DownloadLimits& limits) {
    static const CURLcode initialized = curl_global_init(CURL_GLOBAL_DEFAULT);
    const std::unique_ptr<CURL, decltype(&curl_easy_cleanup)> owner(curl_easy_init(), &curl_easy_cleanup);
    CURL* curl = owner.get();
    if (initialized != CURLE_OK || curl == nullptr) fail("{}: libcurl cannot be initialized", address);

    Transfer transfer{
        .address = address, .body = {}, .max_bytes = limits.max_bytes, .show_progress = isatty(STDERR_FILENO) == 1};
    char reason[CURL_ERROR_SIZE] = "";
    const bool secure = strncasecmp(address.c_str(), "https:", 6) == 0;
    set(curl, CURLOPT_URL, address.c_str());
    set(curl, CURLOPT_PROTOCOLS_STR, "http,https");
    set(curl, CURLOPT_REDIR_PROTOCOLS_STR, secure ? "https" : "http,https");
    set(curl, CURLOPT_FOLLOWLOCATION, 1L);
    set(curl, CURLOPT_MAXREDIRS, 10L);
    // Some of the servers answer 403 to a client that does not name itself.
    set(curl, CURLOPT_USERAGENT, "jetlag-data_prep/1.0 (libcurl)");
    set(curl, CURLOPT_NOSIGNAL, 1L);
    set(curl, CURLOPT_CONNECTTIMEOUT, limits.connect_seconds);
    set(curl, CURLOPT_LOW_SPEED_LIMIT, 1L);
    set(curl, CURLOPT_LOW_SPEED_TIME, limits.stall_seconds);
    set(curl, CURLOPT_ERRORBUFFER, &reason[0]);
    set(curl, CURLOPT_WRITEFUNCTION, &on_data);
    set(curl, CURLOPT_WRITEDATA, &transfer);
    set(curl, CURLOPT_XFERINFOFUNCTION, &on_progress);
    set(curl, CURLOPT_XFERINFODATA, &transfer);
    set(curl, CURLOPT_NOPROGRESS, 0L);

    const CURLcode code = curl_easy_perform(curl);
    if (transfer.shown_kilobytes >= 0) print_note("\n");
    long status = 0;
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    if (transfer.too_large) fail("{}: sends more than the {} bytes allowed", address, limits.max_bytes);
    if (code != CURLE_OK) {
        fail("{}: download failed: {}", address, reason[0] != '\0' ? reason : curl_easy_strerror(code));
    }
    if (status != 200) fail("{}: the server answers with status {}, wanted 200", address, status);
    if (transfer.body.empty()) fail("{}: the server sends an empty body", address);
    return std::move(transfer.body);
}

}  // namespace jetlag
