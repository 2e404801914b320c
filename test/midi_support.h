// Building Standard MIDI Files by hand.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace jetlag::test {

// The bytes that hexadecimal digits stand for; blanks do not count.
inline std::string hex(std::string_view digits) {
    std::string bytes;
    int high = -1;
    for (char c : digits) {
        if (c == ' ') continue;
        const int value = c <= '9' ? c - '0' : c - 'a' + 10;
        if (high < 0) {
            high = value;
            continue;
        }
        bytes += static_cast<char>(high * 16 + value);
        high = -1;
    }
    return bytes;
}

inline std::string big_endian_bytes(uint64_t value, int bytes) {
    std::string text;
    for (int i = bytes; i-- > 0;) text += static_cast<char>(value >> (8 * i) & 0xff);
    return text;
}

// A chunk; `claimed` is the length that it claims, if not its own.
inline std::string chunk(const std::string& name, const std::string& bytes, std::optional<uint32_t> claimed = {}) {
    return name + big_endian_bytes(claimed.value_or(static_cast<uint32_t>(bytes.size())), 4) + bytes;
}

inline std::string midi_header(int format, int tracks, int division) {
    return chunk("MThd", big_endian_bytes(static_cast<uint64_t>(format), 2) +
                             big_endian_bytes(static_cast<uint64_t>(tracks), 2) +
                             big_endian_bytes(static_cast<uint64_t>(division) & 0xffff, 2));
}

// A file of one track, 96 ticks per quarter note.
inline std::string one_track(const std::string& events, std::optional<uint32_t> claimed = {}) {
    return midi_header(1, 1, 96) + chunk("MTrk", events, claimed);
}

inline std::span<const uint8_t> bytes_of(const std::string& text) {
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace jetlag::test
