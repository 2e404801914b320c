// Configuration: one table of keys parses YAML files and --set overrides, checks types and ranges, prints --help
// and writes the resolved configuration. The defaults are those of the structs that the table points into, so
// that each default exists once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace jetlag {

// Where the value of a key goes. An optional takes `null`. A list takes a YAML sequence, or one comma-separated
// scalar (as on a command line: eval.contexts=1024,8192).
using KeyTarget = std::variant<bool*, int64_t*, double*, std::string*, std::optional<int64_t>*, std::vector<int64_t>*,
                               std::vector<std::string>*>;

struct Key {
    std::string path;  // dotted: "train.lr"
    KeyTarget target;
    std::string meaning;                                    // one line for --help
    double min = -std::numeric_limits<double>::infinity();  // of the number, or of each number of a list
    double max = std::numeric_limits<double>::infinity();
    bool min_is_excluded = false;
    std::vector<std::string> choices = {};  // of the text, or of each text of a list; empty: any
    // Shown by --help instead of the target's value, if not empty. With a text target it also says what an empty
    // text stands for ("the corpus's name"): the empty text is then taken even where it is none of the choices.
    std::string default_text = {};
    bool allows_infinity = false;  // by default an infinite number is out of range; NaN always is
};

// One leaf of a YAML file or one --set: a dotted key with its value and where it stands.
struct Setting {
    std::string path;
    std::string value;               // the scalar's text; for a sequence the texts are in `items`
    std::vector<std::string> items;  // never null
    std::vector<bool> item_is_quoted;
    bool is_sequence = false;
    bool is_empty_map = false;  // {}: a section without settings
    bool is_null = false;       // an unquoted null, ~ or nothing
    bool is_quoted = false;     // a quoted scalar is never a number, a bool or null
    std::string where;          // "configs/demo.yaml:12" or "--set train.lr=x"
};

// All leaves of a YAML file, flattened; none if it is empty or holds {}. Aliases stand for what they name. Errors
// (exit code 2) name file and line: missing file, malformed YAML, several documents, a key given twice, a key with a
// dot or one that is no text, a document that is not a map, sequences of anything but scalars, null in a sequence,
// tags, merge keys (<<), nesting without end.
std::vector<Setting> read_settings(const std::filesystem::path& file);

// Adds "--set KEY=VALUE"s in order. VALUE is YAML: a scalar, or a flow sequence [a, b], or a flow map {a: 1, b: 2}.
// A setting replaces what stood at its KEY, below it, or above it: model.position=rope drops an earlier
// model.position.rotary.kind, and model.position.rotary.kind=ntk drops an earlier model.position. A map replaces as a
// whole: train={lr: 1} drops an earlier train.steps. Blanks around KEY do not count.
// Errors (exit code 2): no '=', no key, malformed VALUE.
void add_overrides(std::vector<Setting>& settings, const std::vector<std::string>& overrides);

// Writes the settings into the targets of the table. Errors (exit code 2) are one line that names file, line and
// key: an unknown key (with the nearest valid key), a wrong type, a value out of range, a text that is no choice
// (with the nearest choice). Numbers are read as numbers whatever their form: 2e-5, .5, 1E3, inf; 10_000 is not one.
// An integer key takes 1e3, as it is whole. `none`, `off`, `on`, `yes`, `no`, 123 are texts where a text is wanted;
// null is not, and a text must be UTF-8; a bool is true or false only. A quoted text is one element of a list of texts,
// commas and all.
// null or {} at a path that only has keys below it (an empty section) sets nothing. A path may be a key and a section
// at once (model.position, model.position.rotary.kind): null there is a value of the key, {} an empty section.
void apply_settings(const std::vector<Setting>& settings, const std::vector<Key>& table);

// Where a key was set ("configs/demo.yaml:12", "--set ..."), or "default"; the last place if several: for checks that
// involve several keys.
std::string where_set(const std::vector<Setting>& settings, std::string_view path);

// The keys as an aligned list with type, default, range or choices, and meaning, grouped by first path component in the
// order of the table. Long choices and meanings continue on lines of their own; lines stay under 140 columns.
std::string help_text(const std::vector<Key>& table);

// The values of the targets as YAML, which read_settings and apply_settings read back to the same values
// (doubles with as many digits as needed), and as one line of JSON (nested objects; an infinite number is the text
// "inf" or "-inf"). An empty text is written as "", also where default_text says what it stands for. A table that holds
// a key twice, or a key both with a value and with keys below it, is an error of the program: std::logic_error.
std::string to_yaml(const std::vector<Key>& table);
std::string to_json(const std::vector<Key>& table);

// The settings of a JSON object as written by to_json. `where` names its source in errors and is each setting's
// `where`. Errors (exit code 2): malformed JSON, not an object, arrays of anything but scalars.
std::vector<Setting> settings_from_json(const std::string& json, const std::string& where);

// The candidate closest to `word`, or "" if none is near enough to be meant: about one edit (a character more, less,
// other, or two swapped; case does not count) in three characters. The first of equals.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace jetlag
