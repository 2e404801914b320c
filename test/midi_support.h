// Building Standard MIDI Files by hand, and listening to them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "src/files.h"
#include "test/support.h"

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

// The loudest sample (of 32768) of what fluidsynth, another program, plays of a MIDI file; nothing if it or its sounds
// are not installed, and -1 if it does not play the file.
inline std::optional<int> loudest_sample_played(const std::filesystem::path& midi) {
    const std::string font = "/usr/share/sounds/sf2/TimGM6mb.sf2";
    if (std::system("command -v fluidsynth >/dev/null 2>&1") != 0 || !std::filesystem::exists(font)) return {};
    const TemporaryFolder folder;
    const std::string sound_file = folder.path / "sound.wav";
    const std::string command =
        "fluidsynth -ni -r 8000 -T wav -F '" + sound_file + "' '" + font + "' '" + midi.string() + "' >/dev/null 2>&1";
    if (std::system(command.c_str()) != 0 || !std::filesystem::exists(sound_file)) return -1;
    const std::string sound = read_file(sound_file);
    int loudest = 0;
    for (size_t i = 44; i + 1 < sound.size(); i += 2) {
        int16_t sample;
        std::memcpy(&sample, sound.data() + i, 2);
        loudest = std::max(loudest, std::abs(int{sample}));
    }
    return loudest;
}

inline std::span<const uint8_t> bytes_of(const std::string& text) {
    return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace jetlag::test
