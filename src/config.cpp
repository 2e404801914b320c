// See config.h. In order: small helpers, reading YAML and JSON into settings, settings into targets, targets into
// text. yaml-cpp does not say what a plain scalar is, and neither does this file until it knows the type that the key
// wants: that is why `none` and `off` can be names and 2e-5 is a number.
#include "src/config.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <stdexcept>

#include "src/error.h"
#include "src/files.h"

namespace jetlag {

using Json = nlohmann::ordered_json;  // keeps the order of the table

// ---------------------------------------------------------------------------------------------- small helpers

static std::string trimmed(std::string_view text) {
    const char* blanks = " \t\r\n";
    const size_t first = text.find_first_not_of(blanks);
    if (first == std::string_view::npos) return "";
    return std::string(text.substr(first, text.find_last_not_of(blanks) - first + 1));
}

static std::string lower_case(std::string_view text) {
    std::string lower(text);
    for (char& c : lower)
        if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    return lower;
}

static std::string on_one_line(std::string_view text) {
    std::string line(text);
    for (char& c : line)
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
    return line;
}

// A value for a message: one line, of bearable length, not cut inside a UTF-8 character.
static std::string shown(std::string_view text) {
    const size_t longest = 80;
    if (text.size() <= longest) return on_one_line(text);
    size_t end = longest;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
    return on_one_line(text.substr(0, end)) + "...";
}

static bool is_below(std::string_view path, std::string_view section) {
    return path.size() > section.size() && path.starts_with(section) && path[section.size()] == '.';
}

static std::string_view last_component(std::string_view path) {
    return path.substr(path.rfind('.') + 1);  // npos + 1 is 0
}

// Edit distance in which two neighbours swapped count as one edit. Case does not count.
static int64_t edit_distance(std::string_view a_text, std::string_view b_text) {
    const std::string a = lower_case(a_text), b = lower_case(b_text);
    std::vector<int64_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int64_t>(j);
    for (size_t i = 1; i <= a.size(); ++i) {
        std::swap(before, above);
        std::swap(above, row);
        row[0] = static_cast<int64_t>(i);
        for (size_t j = 1; j <= b.size(); ++j) {
            const int64_t replaced = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
            row[j] = std::min({replaced, above[j] + 1, row[j - 1] + 1});
            const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
        }
    }
    return row[b.size()];
}

// Whether the one can be meant by the other.
static bool is_near(std::string_view a, std::string_view b) {
    const size_t longer = std::max(a.size(), b.size()), shorter = std::min(a.size(), b.size());
    const size_t edits = (longer + 1) / 3;
    return longer - shorter <= edits && edit_distance(a, b) <= static_cast<int64_t>(edits);
}

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
    std::string best;
    int64_t best_distance = std::numeric_limits<int64_t>::max();
    for (const std::string& candidate : candidates) {
        if (!is_near(word, candidate)) continue;
        const int64_t distance = edit_distance(word, candidate);
        if (distance < best_distance) {
            best = candidate;
            best_distance = distance;
        }
    }
    return best;
}

// The key that an unknown path may mean, or "". Near is the whole path, or its last component whatever the section
// (lr, optimizer.lr); of those near, the one for which both together are closest.
static std::string nearest_key(std::string_view path, const std::vector<Key>& table) {
    std::string best;
    int64_t best_distance = std::numeric_limits<int64_t>::max();
    for (const Key& key : table) {
        const std::string_view wanted = last_component(key.path), given = last_component(path);
        if (!is_near(path, key.path) && !is_near(given, wanted)) continue;
        const int64_t distance = edit_distance(path, key.path) + edit_distance(given, wanted);
        if (distance < best_distance) {
            best = key.path;
            best_distance = distance;
        }
    }
    return best;
}

// ---------------------------------------------------------------------------------------------- YAML to settings

// Aliases can nest a document in itself, or multiply it without end: these bounds are beyond any real configuration.
static constexpr int kDeepest = 32;
static constexpr int64_t kMostNodes = 100000;

struct Flattening {
    std::string source;  // the file, or "--set KEY=VALUE"
    bool has_lines;      // whether a line number of the source means something to the user
    int64_t nodes = 0;   // visited so far
    std::vector<Setting> settings = {};
};

static std::string where_in(const Flattening& flattening, const YAML::Mark& mark) {
    if (!flattening.has_lines || mark.is_null()) return flattening.source;
    return fmt::format("{}:{}", flattening.source, mark.line + 1);
}

// yaml-cpp marks plain nodes "?" and quoted scalars "!"; no tag at all is "".
static void refuse_tag(const YAML::Node& node, const std::string& where, const std::string& path) {
    const std::string& tag = node.Tag();
    if (!tag.empty() && tag != "?" && tag != "!")
        fail_usage("{}: {}: the tag '{}' is not supported", where, path, shown(tag));
}

// Appends the leaves at and below `node`, which stands at `path` ("" is the document).
static void flatten(const YAML::Node& node, const std::string& path, const std::string& where, int depth,
                    Flattening& out) {
    if (depth > kDeepest || ++out.nodes > kMostNodes)
        fail_usage("{}: {}: nested too deeply, or an alias within what it names", where, shown(path));
    refuse_tag(node, where, path);

    if (node.IsMap() && node.size() > 0) {
        std::set<std::string> seen;
        for (const auto& entry : node) {
            const std::string entry_where = where_in(out, entry.first.Mark());
            const std::string prefix = path.empty() ? "" : path + ".";
            if (!entry.first.IsScalar() || entry.first.Scalar().empty())
                fail_usage("{}: {}a key that is no text", entry_where, path.empty() ? "" : path + ": ");
            const std::string name = on_one_line(entry.first.Scalar());
            const std::string entry_path = prefix + name;
            if (name == "<<") fail_usage("{}: {}: merge keys are not supported", entry_where, entry_path);
            if (const size_t dot = name.find('.'); dot != std::string::npos)
                fail_usage("{}: {}: a dot in a key; write it as sections, {}: {{{}: ...}}", entry_where,
                           shown(entry_path), shown(name.substr(0, dot)), shown(name.substr(dot + 1)));
            if (!seen.insert(name).second) fail_usage("{}: {}: given twice", entry_where, entry_path);
            flatten(entry.second, entry_path, entry_where, depth + 1, out);
        }
        return;
    }

    Setting setting;
    setting.path = path;
    setting.where = where;
    if (node.IsMap()) {
        setting.is_empty_map = true;
    } else if (node.IsSequence()) {
        setting.is_sequence = true;
        for (const auto& item : node) {
            if (++out.nodes > kMostNodes) fail_usage("{}: {}: too many values", where, path);
            if (item.IsNull()) fail_usage("{}: {}: null in a list", where, path);
            if (!item.IsScalar()) fail_usage("{}: {}: a list of lists or maps; wanted single values", where, path);
            refuse_tag(item, where, path);
            setting.items.push_back(item.Scalar());
            setting.item_is_quoted.push_back(item.Tag() == "!");
        }
    } else if (node.IsScalar()) {
        setting.value = node.Scalar();
        setting.is_quoted = node.Tag() == "!";
    } else {
        setting.is_null = true;
        setting.value = "null";
    }
    out.settings.push_back(setting);
}

// yaml-cpp's parser reports to such a handler; this one counts documents.
struct DocumentCounter : YAML::EventHandler {
    int64_t count = 0;
    YAML::Mark last_start;
    void OnDocumentStart(const YAML::Mark& mark) override {
        ++count;
        last_start = mark;
    }
    void OnDocumentEnd() override {}
    void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
    void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
    void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
    void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
    void OnSequenceEnd() override {}
    void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
    void OnMapEnd() override {}
};

// The one document of a YAML text; a null node if there is none. YAML::Load ignores what follows the first document,
// and YAML::LoadAll never ends where that is a stray ',', which it takes for ever more empty documents.
static YAML::Node load_document(const std::string& text, const Flattening& flattening) {
    try {
        std::istringstream stream(text);
        YAML::Parser parser(stream);
        DocumentCounter documents;
        while (documents.count < 2 && parser.HandleNextDocument(documents)) {
        }
        if (documents.count > 1)
            fail_usage("{}: malformed YAML, or more than one document", where_in(flattening, documents.last_start));
        return YAML::Load(text);
    } catch (const YAML::Exception& e) {
        fail_usage("{}: malformed YAML: {}", where_in(flattening, e.mark), on_one_line(e.msg));
    }
}

std::vector<Setting> read_settings(const std::filesystem::path& file) {
    Flattening flattening = {.source = file.string(), .has_lines = true};
    std::string text;
    try {
        text = read_file(file);
    } catch (const Error& e) {
        fail_usage("{}", e.what());
    }
    const YAML::Node document = load_document(text, flattening);
    if (document.IsNull() || (document.IsMap() && document.size() == 0)) return {};
    const std::string where = where_in(flattening, document.Mark());
    if (!document.IsMap()) fail_usage("{}: a {} where keys are wanted", where, document.IsScalar() ? "value" : "list");
    flatten(document, "", where, 0, flattening);
    return flattening.settings;
}

void add_overrides(std::vector<Setting>& settings, const std::vector<std::string>& overrides) {
    for (const std::string& override_text : overrides) {
        const std::string where = "--set " + on_one_line(override_text);
        const size_t equals = override_text.find('=');
        if (equals == std::string::npos) fail_usage("{}: no '='; wanted KEY=VALUE", where);
        const std::string path = on_one_line(trimmed(std::string_view(override_text).substr(0, equals)));
        if (path.empty()) fail_usage("{}: no key before '='; wanted KEY=VALUE", where);

        Flattening flattening = {.source = where, .has_lines = false};
        const YAML::Node value = load_document(override_text.substr(equals + 1), flattening);
        const bool is_collection = value.IsMap() || value.IsSequence();
        if (is_collection && value.Style() == YAML::EmitterStyle::Block)
            fail_usage(
                "{}: {}: malformed value; wanted one value, [a, b] or {{a: 1}}, and quotes around a text with ': '",
                where, path);
        flatten(value, path, where, 0, flattening);

        std::erase_if(settings, [&](const Setting& earlier) {
            return earlier.path == path || is_below(earlier.path, path) || is_below(path, earlier.path);
        });
        settings.insert(settings.end(), flattening.settings.begin(), flattening.settings.end());
    }
}

std::string where_set(const std::vector<Setting>& settings, std::string_view path) {
    for (auto setting = settings.rbegin(); setting != settings.rend(); ++setting)
        if (setting->path == path) return setting->where;
    return "default";
}

// ---------------------------------------------------------------------------------------------- JSON to settings

// The text of a JSON scalar, as it would stand in YAML.
static std::string json_scalar_text(const Json& scalar) {
    if (scalar.is_string()) return scalar.get<std::string>();
    if (scalar.is_number_float()) return fmt::format("{}", scalar.get<double>());
    return scalar.dump();
}

// Infinite numbers, which JSON lacks, travel as texts.
static bool is_json_text(const Json& scalar) {
    return scalar.is_string() && scalar != "inf" && scalar != "-inf";
}

static void flatten_json(const Json& node, const std::string& path, const std::string& where, int depth,
                         std::vector<Setting>& out) {
    if (depth > kDeepest) fail_usage("{}: {}: nested too deeply", where, shown(path));
    if (node.is_object() && !node.empty()) {
        for (const auto& [name, value] : node.items()) {
            const std::string below = on_one_line(path.empty() ? name : path + "." + name);
            flatten_json(value, below, where, depth + 1, out);
        }
        return;
    }
    Setting setting;
    setting.path = path;
    setting.where = where;
    if (node.is_object()) {
        setting.is_empty_map = true;
    } else if (node.is_array()) {
        setting.is_sequence = true;
        for (const Json& item : node) {
            if (item.is_null()) fail_usage("{}: {}: null in a list", where, path);
            if (item.is_structured()) fail_usage("{}: {}: a list of lists or maps; wanted single values", where, path);
            setting.items.push_back(json_scalar_text(item));
            setting.item_is_quoted.push_back(is_json_text(item));
        }
    } else {
        setting.value = json_scalar_text(node);
        setting.is_null = node.is_null();
        setting.is_quoted = is_json_text(node);
    }
    out.push_back(setting);
}

std::vector<Setting> settings_from_json(const std::string& json, const std::string& where) {
    Json root;
    try {
        root = Json::parse(json);
    } catch (const Json::exception& e) {
        fail_usage("{}: malformed JSON: {}", where, shown(e.what()));
    }
    if (!root.is_object()) fail_usage("{}: found JSON of type {}; wanted an object", where, root.type_name());
    std::vector<Setting> settings;
    if (!root.empty()) flatten_json(root, "", where, 0, settings);
    return settings;
}

// ---------------------------------------------------------------------------------------------- settings to targets

static bool is_list(const Key& key) {
    return std::holds_alternative<std::vector<int64_t>*>(key.target) ||
           std::holds_alternative<std::vector<std::string>*>(key.target);
}

static const char* type_name(const Key& key) {
    static constexpr std::array names = {"true or false",   "integer",  "number", "text",
                                         "integer or null", "integers", "texts"};
    static_assert(names.size() == std::variant_size_v<KeyTarget>);
    return names[key.target.index()];
}

// The type in an error message, of one element where the key is a list.
static const char* wanted_scalar(const Key& key) {
    static constexpr std::array names = {"true or false",      "an integer", "a number", "a text",
                                         "an integer or null", "an integer", "a text"};
    static_assert(names.size() == std::variant_size_v<KeyTarget>);
    return names[key.target.index()];
}

static std::string range_text(const Key& key) {
    std::string range;
    if (std::isfinite(key.min)) range = fmt::format("{} {}", key.min_is_excluded ? ">" : ">=", key.min);
    if (std::isfinite(key.max)) range += fmt::format("{}<= {}", range.empty() ? "" : " and ", key.max);
    return range;
}

[[noreturn]] static void fail_setting(const Setting& setting, const std::string& message) {
    fail_usage("{}: {}: {}", setting.where, shown(setting.path), message);
}

[[noreturn]] static void fail_type(const Setting& setting, const Key& key, std::string_view text) {
    fail_setting(setting, fmt::format("'{}' is not {}", shown(text), wanted_scalar(key)));
}

// The number that the whole text is, in any of the usual forms. A value no double can hold is not one.
static std::optional<double> read_number(std::string_view text) {
    std::string_view digits = text;
    const bool is_negative = digits.starts_with('-');
    if (is_negative || digits.starts_with('+')) digits.remove_prefix(1);
    double magnitude = 0;
    const std::string lower = lower_case(digits);
    if (lower == ".inf" || lower == "inf" || lower == "infinity") {
        magnitude = std::numeric_limits<double>::infinity();
    } else if (lower == ".nan" || lower == "nan") {
        magnitude = std::numeric_limits<double>::quiet_NaN();
    } else {
        if (digits.empty() || !(digits[0] == '.' || (digits[0] >= '0' && digits[0] <= '9'))) return std::nullopt;
        const char* end = digits.data() + digits.size();
        const auto [stopped, error] = std::from_chars(digits.data(), end, magnitude);
        if (error != std::errc() || stopped != end) return std::nullopt;
    }
    return is_negative ? -magnitude : magnitude;
}

// `text` is what the user wrote for the number x.
static void check_range(const Setting& setting, const Key& key, std::string_view text, double x) {
    std::string wanted;
    if (std::isnan(x) || (std::isinf(x) && !key.allows_infinity)) {
        wanted = std::isnan(x) ? "a number" : "a finite number";
    } else if (x < key.min || x > key.max || (key.min_is_excluded && x == key.min)) {
        wanted = range_text(key);
    } else {
        return;
    }
    fail_setting(setting, fmt::format("{} is out of range (wanted {})", shown(text), wanted));
}

static double to_number(const Setting& setting, const Key& key, std::string_view text, bool is_quoted) {
    if (is_quoted) fail_setting(setting, fmt::format("'{}' is in quotes and thus not a number", shown(text)));
    const std::optional<double> x = read_number(text);
    if (!x) fail_type(setting, key, text);
    check_range(setting, key, text, *x);
    return *x;
}

static int64_t to_integer(const Setting& setting, const Key& key, std::string_view text, bool is_quoted) {
    if (is_quoted) fail_setting(setting, fmt::format("'{}' is in quotes and thus not a number", shown(text)));
    const size_t sign = text.starts_with('-') || text.starts_with('+') ? 1 : 0;
    const bool is_plain = text.size() > sign && text.find_first_not_of("0123456789", sign) == std::string_view::npos;
    int64_t n = 0;
    if (is_plain) {
        const char* start = text.data() + (text[0] == '+' ? 1 : 0);  // which from_chars does not take
        const auto [stopped, error] = std::from_chars(start, text.data() + text.size(), n);
        if (error == std::errc::result_out_of_range)
            fail_setting(setting, fmt::format("{} does not fit into 64 bits", shown(text)));
    } else {
        const std::optional<double> x = read_number(text);
        if (!x) fail_type(setting, key, text);
        if (!std::isfinite(*x)) check_range(setting, key, text, *x);
        if (*x != std::floor(*x)) fail_type(setting, key, text);
        // From here on a double holds no longer every integer.
        if (std::fabs(*x) >= 0x1p53)
            fail_setting(setting,
                         fmt::format("{} is too large for this form of an integer; write all its digits", shown(text)));
        n = static_cast<int64_t>(*x);
    }
    check_range(setting, key, text, static_cast<double>(n));
    return n;
}

static std::string to_text(const Setting& setting, const Key& key, const std::string& text) {
    try {
        Json(text).dump();
    } catch (const Json::exception&) {
        fail_setting(setting, "the text is not UTF-8");
    }
    const bool is_unset = text.empty() && !key.default_text.empty();
    if (key.choices.empty() || is_unset) return text;
    if (std::find(key.choices.begin(), key.choices.end(), text) != key.choices.end()) return text;
    const std::string meant = nearest(text, key.choices);
    if (meant.empty())
        fail_setting(setting,
                     fmt::format("'{}' is none of its choices: {}", shown(text), fmt::join(key.choices, ", ")));
    fail_setting(setting, fmt::format("'{}' is none of its choices; did you mean {}?", shown(text), meant));
}

// The elements of a list: those of a sequence, or the parts of a scalar between commas.
static void split_list(const Setting& setting, const Key& key, std::vector<std::string>& items,
                       std::vector<bool>& item_is_quoted) {
    if (setting.is_sequence) {
        items = setting.items;
        item_is_quoted = setting.item_is_quoted;
    } else if (setting.is_quoted) {
        items = {setting.value};
        item_is_quoted = {true};
    } else {
        for (size_t start = 0; start <= setting.value.size();) {
            const size_t comma = std::min(setting.value.find(',', start), setting.value.size());
            items.push_back(trimmed(std::string_view(setting.value).substr(start, comma - start)));
            if (items.back().empty())
                fail_setting(setting, fmt::format("'{}' has an empty element; wanted {} between commas",
                                                  shown(setting.value), wanted_scalar(key)));
            start = comma + 1;
        }
        item_is_quoted.assign(items.size(), false);
    }
}

static void set_target(const Setting& setting, const Key& key) {
    const bool takes_null = std::holds_alternative<std::optional<int64_t>*>(key.target);
    const std::string wanted = is_list(key) ? std::string("a list of ") + type_name(key) : wanted_scalar(key);
    if (setting.is_empty_map) fail_setting(setting, "a map is not " + wanted);
    if (setting.is_null && !takes_null) fail_setting(setting, "null is not " + wanted);
    if (setting.is_sequence && !is_list(key)) fail_setting(setting, "a list is not " + wanted);

    const std::string& text = setting.value;
    if (auto* flag = std::get_if<bool*>(&key.target)) {
        if (setting.is_quoted || (text != "true" && text != "false")) fail_type(setting, key, text);
        **flag = text == "true";
    } else if (auto* integer = std::get_if<int64_t*>(&key.target)) {
        **integer = to_integer(setting, key, text, setting.is_quoted);
    } else if (auto* number = std::get_if<double*>(&key.target)) {
        **number = to_number(setting, key, text, setting.is_quoted);
    } else if (auto* string = std::get_if<std::string*>(&key.target)) {
        **string = to_text(setting, key, text);
    } else if (auto* optional = std::get_if<std::optional<int64_t>*>(&key.target)) {
        if (setting.is_null)
            **optional = std::nullopt;
        else
            **optional = to_integer(setting, key, text, setting.is_quoted);
    } else {
        std::vector<std::string> items;
        std::vector<bool> item_is_quoted;
        split_list(setting, key, items, item_is_quoted);
        if (auto* integers = std::get_if<std::vector<int64_t>*>(&key.target)) {
            std::vector<int64_t> values;
            for (size_t i = 0; i < items.size(); ++i)
                values.push_back(to_integer(setting, key, items[i], item_is_quoted[i]));
            **integers = values;
        } else {
            std::vector<std::string> values;
            for (const std::string& item : items) values.push_back(to_text(setting, key, item));
            *std::get<std::vector<std::string>*>(key.target) = values;
        }
    }
}

void apply_settings(const std::vector<Setting>& settings, const std::vector<Key>& table) {
    const auto find_key = [&](std::string_view path) {
        return std::find_if(table.begin(), table.end(), [&](const Key& key) { return key.path == path; });
    };
    const auto find_below = [&](std::string_view path) {
        return std::find_if(table.begin(), table.end(), [&](const Key& key) { return is_below(key.path, path); });
    };
    for (const Setting& setting : settings) {
        const auto key = find_key(setting.path), below = find_below(setting.path);
        if (below != table.end() && (setting.is_empty_map || (setting.is_null && key == table.end()))) continue;
        if (key != table.end()) {
            set_target(setting, *key);
            continue;
        }
        if (below != table.end()) {
            const std::string found = setting.is_sequence ? "a list" : fmt::format("'{}'", shown(setting.value));
            fail_setting(setting, fmt::format("{} is not a section of keys (such as {})", found, below->path));
        }
        for (const Key& above : table)
            if (is_below(setting.path, above.path) && find_below(above.path) == table.end())
                fail_setting(setting, fmt::format("unknown key; {} has a value, not keys below it", above.path));
        const std::string meant = nearest_key(setting.path, table);
        if (meant.empty()) fail_setting(setting, "unknown key (--help lists all keys)");
        fail_setting(setting, fmt::format("unknown key; did you mean {}?", meant));
    }
}

// ---------------------------------------------------------------------------------------------- targets to text

static Json json_of(double x) {
    return std::isfinite(x) ? Json(x) : Json(fmt::format("{}", x));
}

static Json target_json(const Key& key) {
    if (auto* number = std::get_if<double*>(&key.target)) return json_of(**number);
    if (auto* optional = std::get_if<std::optional<int64_t>*>(&key.target))
        return (*optional)->has_value() ? Json((*optional)->value()) : Json();
    if (auto* flag = std::get_if<bool*>(&key.target)) return **flag;
    if (auto* integer = std::get_if<int64_t*>(&key.target)) return **integer;
    if (auto* string = std::get_if<std::string*>(&key.target)) return **string;
    if (auto* integers = std::get_if<std::vector<int64_t>*>(&key.target)) return **integers;
    return *std::get<std::vector<std::string>*>(key.target);
}

static Json table_json(const std::vector<Key>& table) {
    Json root = Json::object();
    for (const Key& key : table) {
        Json* section = &root;
        size_t start = 0;
        for (size_t dot; (dot = key.path.find('.', start)) != std::string::npos; start = dot + 1) {
            section = &section->emplace(key.path.substr(start, dot - start), Json::object()).first.value();
            if (!section->is_object())
                throw std::logic_error(key.path + ": the table also has a key at " + key.path.substr(0, dot));
        }
        if (!section->emplace(key.path.substr(start), target_json(key)).second)
            throw std::logic_error(key.path + ": the table has this key twice, or keys below it");
    }
    return root;
}

std::string to_json(const std::vector<Key>& table) {
    return table_json(table).dump();
}

// With a point also before an exponent (1.0e-08), without which YAML 1.1 readers such as PyYAML see a text.
static std::string number_text(double x) {
    std::string text = fmt::format("{}", x);
    const size_t exponent = text.find('e');
    if (exponent != std::string::npos && text.find('.') == std::string::npos) text.insert(exponent, ".0");
    return text;
}

// A plain text that some YAML reader would take for something else.
static bool needs_quotes(const std::string& text) {
    static const std::set<std::string> words = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"};
    const std::optional<double> number = read_number(text);
    return words.count(lower_case(text)) > 0 || (number && std::isfinite(*number));
}

static void emit_yaml(const Json& node, YAML::Emitter& out) {
    if (node.is_object()) {
        out << YAML::BeginMap;
        for (const auto& [name, value] : node.items()) {
            out << YAML::Key << name << YAML::Value;
            emit_yaml(value, out);
        }
        out << YAML::EndMap;
    } else if (node.is_array()) {
        out << YAML::Flow << YAML::BeginSeq;
        for (const Json& item : node) emit_yaml(item, out);
        out << YAML::EndSeq;
    } else if (node.is_string()) {
        const std::string text = node.get<std::string>();
        if (needs_quotes(text)) out << YAML::DoubleQuoted;
        out << text;
    } else if (node.is_number_float()) {
        out << number_text(node.get<double>());
    } else if (node.is_null()) {
        out << YAML::Null;
    } else {
        out << node.dump();
    }
}

std::string to_yaml(const std::vector<Key>& table) {
    YAML::Emitter out;
    out.SetNullFormat(YAML::LowerNull);
    emit_yaml(table_json(table), out);
    if (!out.good()) throw std::logic_error("cannot write the configuration as YAML: " + out.GetLastError());
    return std::string(out.c_str()) + "\n";
}

// ---------------------------------------------------------------------------------------------- --help

static std::string default_shown(const Key& key) {
    if (!key.default_text.empty()) return key.default_text;
    const Json value = target_json(key);
    const auto scalar = [](const Json& x) {
        if (x.is_string() && !x.get<std::string>().empty()) return x.get<std::string>();
        return x.is_number_float() ? number_text(x.get<double>()) : x.dump();
    };
    if (!value.is_array()) return scalar(value);
    std::vector<std::string> items;
    for (const Json& item : value) items.push_back(scalar(item));
    return fmt::format("[{}]", fmt::join(items, ", "));
}

// Breaks at blanks into lines of at most `width` characters; a longer word has a line of its own.
static std::vector<std::string> wrapped(const std::string& text, size_t width) {
    std::vector<std::string> lines(1);
    for (size_t start = 0; start < text.size();) {
        const size_t end = std::min(text.find(' ', start), text.size());
        const std::string word = text.substr(start, end - start);
        std::string& line = lines.back();
        if (line.empty())
            line = word;
        else if (line.size() + 1 + word.size() <= width)
            line += " " + word;
        else
            lines.push_back(word);
        start = end + 1;
    }
    return lines;
}

std::string help_text(const std::vector<Key>& table) {
    constexpr size_t kColumns = 5, kLineWidth = 138, kGap = 2, kWidestDefault = 26, kWidestRange = 32,
                     kNarrowestMeaning = 30;
    using Row = std::array<std::string, kColumns>;
    std::vector<std::string> sections;  // in order of their first key
    std::vector<Row> rows = {{"key", "type", "default", "range or choices", "meaning"}};
    for (const Key& key : table) {
        const std::string section = key.path.substr(0, key.path.find('.'));
        if (std::find(sections.begin(), sections.end(), section) == sections.end()) sections.push_back(section);
        std::string range = range_text(key);
        if (!key.choices.empty()) range = fmt::format("{}", fmt::join(key.choices, ", "));
        rows.push_back({key.path, type_name(key), default_shown(key), range, key.meaning});
    }

    const std::array<size_t, kColumns> widest = {kLineWidth, kLineWidth, kWidestDefault, kWidestRange, kLineWidth};
    std::array<size_t, kColumns> widths = {};
    for (const Row& row : rows)
        for (size_t column = 0; column + 1 < kColumns; ++column)
            for (const std::string& line : wrapped(row[column], widest[column]))
                widths[column] = std::max(widths[column], line.size());
    size_t before_meaning = 0;
    for (size_t column = 0; column + 1 < kColumns; ++column) before_meaning += kGap + widths[column];
    widths[kColumns - 1] = std::max(kNarrowestMeaning, kLineWidth - std::min(kLineWidth, before_meaning + kGap));

    std::string text;
    const auto add_row = [&](const Row& row) {
        std::array<std::vector<std::string>, kColumns> cells;
        size_t lines = 0;
        for (size_t column = 0; column < kColumns; ++column) {
            cells[column] = wrapped(row[column], widths[column]);
            lines = std::max(lines, cells[column].size());
        }
        for (size_t i = 0; i < lines; ++i) {
            std::string line;
            for (size_t column = 0; column < kColumns; ++column)
                line += fmt::format("{:{}}{:{}}", "", kGap, i < cells[column].size() ? cells[column][i] : "",
                                    widths[column]);
            text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
        }
    };
    add_row(rows[0]);
    for (const std::string& section : sections) {
        text += "\n";
        for (const Row& row : rows)
            if (&row != &rows[0] && (row[0] == section || is_below(row[0], section))) add_row(row);
    }
    return text;
}

}  // namespace jetlag
