// The configuration: reading YAML and --set, types and ranges, every error message, --help, writing and reading back.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>

#include "src/config.h"
#include "src/error.h"
#include "test/support.h"

namespace jetlag {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Values {
    bool shuffle = false;
    int64_t steps = 300;
    int64_t batch = 32;
    double lr = 3e-3;
    double clip = kInfinity;
    std::string position = "full";
    std::string corpus;
    std::string gate_init;
    std::string rotary_kind = "rope";
    std::optional<int64_t> data_seed;
    int64_t embed_dim = 96;
    std::vector<int64_t> contexts = {1024, 8192};
    std::vector<std::string> sectors;
};

std::vector<Key> table_of(Values& v) {
    return {
        {.path = "data.corpus", .target = &v.corpus, .meaning = "bytes to learn"},
        {.path = "model.position",
         .target = &v.position,
         .meaning = "position method",
         .choices = {"none", "rope", "full", "lc_affine"}},
        {.path = "model.position.rotary.kind",
         .target = &v.rotary_kind,
         .meaning = "rotary",
         .choices = {"none", "rope", "ntk"}},
        {.path = "model.position.lag_bias.sectors",
         .target = &v.sectors,
         .meaning = "sectors",
         .choices = {"fj", "affine", "lc"}},
        {.path = "model.embed_dim", .target = &v.embed_dim, .meaning = "channels", .min = 1, .max = 4096},
        {.path = "model.gate_init",
         .target = &v.gate_init,
         .meaning = "start of the gates",
         .choices = {"affine", "fj"},
         .default_text = "by the sectors"},
        {.path = "train.steps", .target = &v.steps, .meaning = "optimizer steps", .min = 1},
        {.path = "train.batch", .target = &v.batch, .meaning = "windows per step", .min = 1},
        {.path = "train.lr", .target = &v.lr, .meaning = "learning rate", .min = 0, .max = 10, .min_is_excluded = true},
        {.path = "train.clip",
         .target = &v.clip,
         .meaning = "largest gradient norm",
         .min = 0,
         .allows_infinity = true},
        {.path = "train.shuffle", .target = &v.shuffle, .meaning = "shuffle"},
        {.path = "train.data_seed", .target = &v.data_seed, .meaning = "seed of the batches", .min = 0},
        {.path = "eval.contexts", .target = &v.contexts, .meaning = "lengths", .min = 1, .max = 1e9},
    };
}

// Settings of `yaml` as the file configs.yaml in a temporary folder; messages name it x.yaml.
struct ConfigTest : testing::Test {
    test::TemporaryFolder folder;
    Values values;

    std::filesystem::path write(const std::string& yaml) {
        const std::filesystem::path file = folder.path / "x.yaml";
        std::ofstream(file, std::ios::binary) << yaml;
        return file;
    }
    std::vector<Setting> read(const std::string& yaml) { return read_settings(write(yaml)); }

    // The message of the error that loading gives, without the folder; it must be one line and have exit code 2.
    std::string error(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
        try {
            load(yaml, overrides);
        } catch (const Error& e) {
            EXPECT_EQ(e.exit_code, kExitUsage) << e.what();
            std::string message = e.what();
            EXPECT_EQ(message.find_first_of("\n\r"), std::string::npos) << message;
            const std::string prefix = folder.path.string() + "/";
            if (message.starts_with(prefix)) message.erase(0, prefix.size());
            return message;
        }
        return "no error";
    }
    void load(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
        std::vector<Setting> settings = read(yaml);
        add_overrides(settings, overrides);
        values = Values();
        apply_settings(settings, table_of(values));
    }
    std::string set_error(const std::string& override_text) { return error("", {override_text}); }
    void set(const std::string& override_text) { load("", {override_text}); }
};

std::vector<std::string> paths_of(const std::vector<Setting>& settings) {
    std::vector<std::string> paths;
    for (const Setting& setting : settings) paths.push_back(setting.path);
    return paths;
}

using Texts = std::vector<std::string>;
using Integers = std::vector<int64_t>;

TEST_F(ConfigTest, ReadsEveryType) {
    load(
        "data: {corpus: some where/x.bin}\n"
        "model:\n  position: none\n  embed_dim: 48\n"
        "train:\n  steps: 1e3\n  lr: 2e-5\n  clip: 1E3\n  shuffle: true\n  data_seed: 7\n"
        "eval:\n  contexts:\n    - 1\n    - 2e3\n");
    EXPECT_EQ(values.corpus, "some where/x.bin");
    EXPECT_EQ(values.position, "none");
    EXPECT_EQ(values.embed_dim, 48);
    EXPECT_EQ(values.steps, 1000);
    EXPECT_EQ(values.lr, 2e-5);
    EXPECT_EQ(values.clip, 1000.0);
    EXPECT_TRUE(values.shuffle);
    EXPECT_EQ(values.data_seed, 7);
    EXPECT_EQ(values.contexts, (Integers{1, 2000}));
    EXPECT_EQ(values.batch, 32);
}

TEST_F(ConfigTest, FormsOfNumbers) {
    const std::vector<std::pair<std::string, double>> good = {{"2e-5", 2e-5}, {".5", 0.5},           {"5.", 5},
                                                              {"1E0", 1},     {"+.25e+1", 2.5},      {"0.1", 0.1},
                                                              {"007", 7},     {"4.9e-324", 4.9e-324}};
    for (const auto& [text, value] : good) {
        set("train.lr=" + text);
        EXPECT_EQ(values.lr, value) << text;
    }
    for (const std::string text :
         {"fast", "1_000", "0x10", "1e", "e5", ".", "+", "1 2", "+-1", "--1", "1e999", "1.2.3", "true"})
        EXPECT_EQ(set_error("train.lr=" + text),
                  "--set train.lr=" + text + ": train.lr: '" + text + "' is not a number");
    EXPECT_EQ(set_error("train.lr='1'"), "--set train.lr='1': train.lr: '1' is in quotes and thus not a number");
    EXPECT_EQ(set_error("train.lr="), "--set train.lr=: train.lr: null is not a number");
}

TEST_F(ConfigTest, FormsOfIntegers) {
    const std::vector<std::pair<std::string, int64_t>> good = {{"1e3", 1000},
                                                               {"1.5e1", 15},
                                                               {"+12", 12},
                                                               {"12.0", 12},
                                                               {"9223372036854775807", INT64_MAX},
                                                               {"9007199254740993", 9007199254740993}};
    for (const auto& [text, value] : good) {
        set("train.steps=" + text);
        EXPECT_EQ(values.steps, value) << text;
    }
    for (const std::string text : {"1.5", "many", "1e-1", "+-5", "-x", "true"})
        EXPECT_EQ(set_error("train.steps=" + text),
                  "--set train.steps=" + text + ": train.steps: '" + text + "' is not an integer");
    EXPECT_EQ(set_error("train.steps=9223372036854775808"),
              "--set train.steps=9223372036854775808: train.steps: 9223372036854775808 does not fit into 64 bits");
    EXPECT_EQ(
        set_error("train.steps=1e20"),
        "--set train.steps=1e20: train.steps: 1e20 is too large for this form of an integer; write all its digits");
    EXPECT_EQ(set_error("train.steps=.inf"),
              "--set train.steps=.inf: train.steps: .inf is out of range (wanted a finite number)");
    EXPECT_EQ(set_error("train.steps=\"5\""),
              "--set train.steps=\"5\": train.steps: '5' is in quotes and thus not a number");
    EXPECT_EQ(set_error("train.steps=null"), "--set train.steps=null: train.steps: null is not an integer");
}

TEST_F(ConfigTest, Ranges) {
    EXPECT_EQ(error("train:\n  lr: 1\n  steps: 0\n"), "x.yaml:3: train.steps: 0 is out of range (wanted >= 1)");
    EXPECT_EQ(set_error("train.steps=-1e3"), "--set train.steps=-1e3: train.steps: -1e3 is out of range (wanted >= 1)");
    EXPECT_EQ(set_error("train.lr=0"), "--set train.lr=0: train.lr: 0 is out of range (wanted > 0 and <= 10)");
    EXPECT_EQ(set_error("train.lr=10.1"), "--set train.lr=10.1: train.lr: 10.1 is out of range (wanted > 0 and <= 10)");
    EXPECT_EQ(set_error("train.lr=inf"), "--set train.lr=inf: train.lr: inf is out of range (wanted a finite number)");
    EXPECT_EQ(set_error("train.lr=.nan"), "--set train.lr=.nan: train.lr: .nan is out of range (wanted a number)");
    EXPECT_EQ(set_error("train.clip=NaN"), "--set train.clip=NaN: train.clip: NaN is out of range (wanted a number)");
    EXPECT_EQ(set_error("train.clip=-.inf"), "--set train.clip=-.inf: train.clip: -.inf is out of range (wanted >= 0)");
    EXPECT_EQ(set_error("eval.contexts=[5, 0]"),
              "--set eval.contexts=[5, 0]: eval.contexts: 0 is out of range (wanted >= 1 and <= 1000000000)");
    set("train.lr=10");
    EXPECT_EQ(values.lr, 10);
    set("train.clip=.inf");
    EXPECT_EQ(values.clip, kInfinity);
    set("train.clip=0");
    EXPECT_EQ(values.clip, 0);
}

TEST_F(ConfigTest, BooleansAreTrueOrFalseOnly) {
    set("train.shuffle=true");
    EXPECT_TRUE(values.shuffle);
    load("train: {shuffle: true}", {"train.shuffle=false"});
    EXPECT_FALSE(values.shuffle);
    for (const std::string text : {"yes", "on", "1", "True", "'true'"}) {
        const std::string bare = text == "'true'" ? "true" : text;
        EXPECT_EQ(set_error("train.shuffle=" + text),
                  "--set train.shuffle=" + text + ": train.shuffle: '" + bare + "' is not true or false");
    }
}

TEST_F(ConfigTest, TextsAreWhatTheyLookLike) {
    for (const std::string text : {"none", "off", "on", "yes", "no", "123", "2e-5", "true", "a,b", "C:/x", "inf"}) {
        set("data.corpus=" + text);
        EXPECT_EQ(values.corpus, text);
        set("data.corpus='" + text + "'");
        EXPECT_EQ(values.corpus, text);
    }
    set("data.corpus='null'");
    EXPECT_EQ(values.corpus, "null");
    set("data.corpus=''");
    EXPECT_EQ(values.corpus, "");
    set("data.corpus=a=b");
    EXPECT_EQ(values.corpus, "a=b");
    load("data:\n  corpus: |\n    5\n");
    EXPECT_EQ(values.corpus, "5\n");
    EXPECT_EQ(set_error("data.corpus=null"), "--set data.corpus=null: data.corpus: null is not a text");
    EXPECT_EQ(error("data:\n  corpus: a\xff\xfe\n"), "x.yaml:2: data.corpus: the text is not UTF-8");
}

TEST_F(ConfigTest, OptionalTakesNull) {
    for (const std::string text : {"null", "~", ""}) {
        load("train: {data_seed: 3}", {"train.data_seed=" + text});
        EXPECT_FALSE(values.data_seed.has_value()) << text;
    }
    EXPECT_EQ(set_error("train.data_seed=none"),
              "--set train.data_seed=none: train.data_seed: 'none' is not an integer or null");
    EXPECT_EQ(set_error("train.data_seed=-1"),
              "--set train.data_seed=-1: train.data_seed: -1 is out of range (wanted >= 0)");
}

TEST_F(ConfigTest, Lists) {
    set("eval.contexts=[1,2]");
    EXPECT_EQ(values.contexts, (Integers{1, 2}));
    set("eval.contexts=3, 4");
    EXPECT_EQ(values.contexts, (Integers{3, 4}));
    set("eval.contexts=5");
    EXPECT_EQ(values.contexts, (Integers{5}));
    set("eval.contexts=[]");
    EXPECT_EQ(values.contexts, Integers{});
    set("model.position.lag_bias.sectors=affine,lc");
    EXPECT_EQ(values.sectors, (Texts{"affine", "lc"}));
    EXPECT_EQ(set_error("eval.contexts=1,,2"),
              "--set eval.contexts=1,,2: eval.contexts: '1,,2' has an empty element; wanted an integer between commas");
    EXPECT_EQ(set_error("eval.contexts=,1"), "--set eval.contexts=,1: malformed YAML, or more than one document");
    EXPECT_EQ(set_error("eval.contexts=1,"),
              "--set eval.contexts=1,: eval.contexts: '1,' has an empty element; wanted an integer between commas");
    EXPECT_EQ(set_error("eval.contexts=1,x"), "--set eval.contexts=1,x: eval.contexts: 'x' is not an integer");
    EXPECT_EQ(set_error("eval.contexts=['1']"),
              "--set eval.contexts=['1']: eval.contexts: '1' is in quotes and thus not a number");
    EXPECT_EQ(set_error("eval.contexts='1,2'"),
              "--set eval.contexts='1,2': eval.contexts: '1,2' is in quotes and thus not a number");
    EXPECT_EQ(set_error("eval.contexts="), "--set eval.contexts=: eval.contexts: null is not a list of integers");
    EXPECT_EQ(set_error("eval.contexts={}"), "--set eval.contexts={}: eval.contexts: a map is not a list of integers");
    EXPECT_EQ(set_error("train.lr=[1]"), "--set train.lr=[1]: train.lr: a list is not a number");
    EXPECT_EQ(set_error("data.corpus=[a]"), "--set data.corpus=[a]: data.corpus: a list is not a text");

    Texts any;
    std::vector<Setting> settings;
    add_overrides(settings, {"names='a, b'"});
    apply_settings(settings, {{.path = "names", .target = &any, .meaning = ""}});
    EXPECT_EQ(any, (Texts{"a, b"}));
}

TEST_F(ConfigTest, Choices) {
    EXPECT_EQ(error("model:\n  position: lc_afine\n"),
              "x.yaml:2: model.position: 'lc_afine' is none of its choices; did you mean lc_affine?");
    EXPECT_EQ(
        set_error("model.position=xyzzy"),
        "--set model.position=xyzzy: model.position: 'xyzzy' is none of its choices: none, rope, full, lc_affine");
    EXPECT_EQ(set_error("model.position.lag_bias.sectors=[fj, afine]"),
              "--set model.position.lag_bias.sectors=[fj, afine]: model.position.lag_bias.sectors: 'afine' is none of "
              "its choices; did you mean affine?");
    EXPECT_EQ(set_error("model.position=''"),
              "--set model.position='': model.position: '' is none of its choices: none, rope, full, lc_affine");
    load("", {"model.gate_init=fj", "model.gate_init=''"});
    EXPECT_EQ(values.gate_init, "");
}

TEST_F(ConfigTest, UnknownKeysNameTheNearest) {
    EXPECT_EQ(error("train:\n  lr: 1\n\n  batchs: 4\n"),
              "x.yaml:4: train.batchs: unknown key; did you mean train.batch?");
    const std::vector<std::pair<std::string, std::string>> meant = {
        {"lr", "train.lr"},
        {"train.embed_dim", "model.embed_dim"},
        {"train.LR", "train.lr"},
        {"trian.steps", "train.steps"},
        {"train.stesp", "train.steps"},
        {"eval.context", "eval.contexts"},
        {"optimizer.lr", "train.lr"},
        {"model.position.rotary.kynd", "model.position.rotary.kind"},
        {"positon", "model.position"},
        {"model.embed-dim", "model.embed_dim"}};
    for (const auto& [path, key] : meant)
        EXPECT_EQ(set_error(path + "=1"), "--set " + path + "=1: " + path + ": unknown key; did you mean " + key + "?");
    EXPECT_EQ(set_error("zzz.qqqqqqqq=1"), "--set zzz.qqqqqqqq=1: zzz.qqqqqqqq: unknown key (--help lists all keys)");
    EXPECT_EQ(set_error("zzzz={}"), "--set zzzz={}: zzzz: unknown key (--help lists all keys)");
    EXPECT_EQ(set_error("zzzz="), "--set zzzz=: zzzz: unknown key (--help lists all keys)");
    EXPECT_EQ(set_error("train.lr.x=1"),
              "--set train.lr.x=1: train.lr.x: unknown key; train.lr has a value, not keys below it");
}

TEST_F(ConfigTest, Sections) {
    EXPECT_EQ(error("data: {}\ntrain: 5\n"), "x.yaml:2: train: '5' is not a section of keys (such as train.steps)");
    EXPECT_EQ(error("train: [1, 2]\n"), "x.yaml:1: train: a list is not a section of keys (such as train.steps)");
    EXPECT_EQ(set_error("model.position.rotary=rope"),
              "--set model.position.rotary=rope: model.position.rotary: 'rope' is not a section of keys (such as "
              "model.position.rotary.kind)");
    EXPECT_EQ(set_error("model.position="), "--set model.position=: model.position: null is not a text");
    EXPECT_EQ(set_error("train.lr={}"), "--set train.lr={}: train.lr: a map is not a number");

    load("train:\nmodel: {}\neval: {contexts: 7}\n");
    EXPECT_EQ(values.contexts, (Integers{7}));
    EXPECT_EQ(values.steps, 300);
    load("model: {position: {}}\n");
    EXPECT_EQ(values.position, "full");
    load("model: {position: {rotary: {kind: ntk}, lag_bias: {sectors: [affine, lc]}}}\n");
    EXPECT_EQ(values.rotary_kind, "ntk");
    EXPECT_EQ(values.sectors, (Texts{"affine", "lc"}));
}

TEST_F(ConfigTest, FilesWithoutSettings) {
    for (const std::string yaml : {"", "{}", "# only a comment\n", "---\n", "null\n", "\n\n"})
        EXPECT_TRUE(read(yaml).empty()) << yaml;
}

TEST_F(ConfigTest, SettingsKnowWhereTheyStand) {
    std::vector<Setting> settings =
        read("train:\n  lr: 1\n\n  # comment\n  data_seed:\neval:\n  contexts:\n    - 1\n    - 'x'\n");
    ASSERT_EQ(paths_of(settings), (Texts{"train.lr", "train.data_seed", "eval.contexts"}));
    const std::string file = (folder.path / "x.yaml").string();
    EXPECT_EQ(where_set(settings, "train.lr"), file + ":2");
    EXPECT_EQ(where_set(settings, "train.data_seed"), file + ":5");
    EXPECT_EQ(where_set(settings, "eval.contexts"), file + ":7");
    EXPECT_EQ(where_set(settings, "train.steps"), "default");
    EXPECT_TRUE(settings[1].is_null);
    EXPECT_TRUE(settings[2].is_sequence);
    EXPECT_EQ(settings[2].items, (Texts{"1", "x"}));
    EXPECT_EQ(settings[2].item_is_quoted, (std::vector<bool>{false, true}));
    add_overrides(settings, {"train.lr=2", "train.lr=3"});
    EXPECT_EQ(where_set(settings, "train.lr"), "--set train.lr=3");
    EXPECT_EQ(where_set(settings, "train.data_seed"), file + ":5");
}

TEST_F(ConfigTest, BadFiles) {
    try {
        read_settings(folder.path / "missing.yaml");
        FAIL() << "a missing file was read";
    } catch (const Error& e) {
        EXPECT_EQ(e.exit_code, kExitUsage);
        EXPECT_NE(std::string(e.what()).find("missing.yaml"), std::string::npos) << e.what();
    }
    EXPECT_EQ(error("train:\n  lr: 1\n  lr: 2\n"), "x.yaml:3: train.lr: given twice");
    EXPECT_EQ(error("train: {lr: 1}\neval:\ntrain: {steps: 2}\n"), "x.yaml:3: train: given twice");
    EXPECT_EQ(error("train.lr: 1\n"), "x.yaml:1: train.lr: a dot in a key; write it as sections, train: {lr: ...}");
    EXPECT_EQ(error("\n- 1\n- 2\n"), "x.yaml:2: a list where keys are wanted");
    EXPECT_EQ(error("hello\n"), "x.yaml:1: a value where keys are wanted");
    for (const std::string second : {"---\ntrain: {lr: 2}\n", "---\n", ", 1"})
        EXPECT_EQ(error("{train: {lr: 1}}\n\n" + second), "x.yaml:3: malformed YAML, or more than one document")
            << second;
    EXPECT_EQ(error("--- {train: {lr: 1}}\n...\n"), "no error");
    EXPECT_EQ(error("eval:\n  contexts: [1, [2]]\n"),
              "x.yaml:2: eval.contexts: a list of lists or maps; wanted single values");
    EXPECT_EQ(error("eval:\n  contexts: [1, {a: 2}]\n"),
              "x.yaml:2: eval.contexts: a list of lists or maps; wanted single values");
    EXPECT_EQ(error("eval:\n  contexts: [1, null]\n"), "x.yaml:2: eval.contexts: null in a list");
    EXPECT_EQ(error("train:\n  ? [a, b]\n  : 1\n"), "x.yaml:2: train: a key that is no text");
    EXPECT_EQ(error("train:\n  lr: !!float 1\n"),
              "x.yaml:2: train.lr: the tag 'tag:yaml.org,2002:float' is not supported");
    EXPECT_EQ(error("a: 1\ntrain: {lr: 1\n").substr(0, 24), "x.yaml:3: malformed YAML");
    EXPECT_EQ(error("train:\n  lr: 1\n bad\n").substr(0, 24), "x.yaml:3: malformed YAML");
    EXPECT_EQ(error("train:\n\tlr: 1\n").substr(0, 24), "x.yaml:2: malformed YAML");
    EXPECT_EQ(error("train:\n  lr: *nothing\n").substr(0, 24), "x.yaml:2: malformed YAML");
}

TEST_F(ConfigTest, Aliases) {
    load("train:\n  steps: &n 12\n  batch: *n\neval:\n  contexts: &c [1, 2]\n");
    EXPECT_EQ(values.batch, 12);
    EXPECT_EQ(where_set(read("train:\n  steps: &n 12\n  batch: *n\n"), "train.batch"),
              (folder.path / "x.yaml").string() + ":3");
    EXPECT_EQ(error("train: &t\n  lr: 1\neval:\n  <<: *t\n"), "x.yaml:4: eval.<<: merge keys are not supported");
    EXPECT_NE(error("train: &t\n  lr: 1\n  below: *t\n").find("nested too deeply, or an alias within what it names"),
              std::string::npos);
    EXPECT_NE(error("&t a: &u\n  b: &v [1, *v]\n").find("a list of lists or maps"), std::string::npos);

    std::string many = "a0: &a0 {x: 1, y: 2}\n";  // 2^31 leaves
    for (int i = 1; i <= 30; ++i) many += fmt::format("a{}: &a{} {{x: *a{}, y: *a{}}}\n", i, i, i - 1, i - 1);
    EXPECT_NE(error(many).find("nested too deeply"), std::string::npos);
}

TEST_F(ConfigTest, DeepNestingIsAnError) {
    std::string maps;
    for (int i = 0; i < 100; ++i) maps += std::string(i, ' ') + "a:\n";
    EXPECT_NE(error(maps).find("nested too deeply"), std::string::npos);
    for (const std::string opening : {"[", "{a: ", "{", "? ", "- "}) {
        std::string text;
        for (int i = 0; i < 20000; ++i) text += opening;
        EXPECT_NE(error(text), "no error") << opening;
        EXPECT_NE(set_error("data.corpus=" + text), "no error") << opening;
    }
    std::string json;
    for (int i = 0; i < 20000; ++i) json += "{\"a\":";
    json += "1" + std::string(20000, '}');
    EXPECT_THROW(settings_from_json(json, "x"), Error);
}

TEST_F(ConfigTest, OverridesReplaceTheSameKeyAndThoseBelowAndAbove) {
    const std::string composed =
        "model:\n  position: {rotary: {kind: ntk}, lag_bias: {sectors: [lc]}}\n  embed_dim: 8\n";
    std::vector<Setting> settings = read(composed);
    add_overrides(settings, {"model.position=rope"});
    EXPECT_EQ(paths_of(settings), (Texts{"model.embed_dim", "model.position"}));
    EXPECT_EQ(settings[1].value, "rope");
    add_overrides(settings, {"model.position.rotary.kind=none"});
    EXPECT_EQ(paths_of(settings), (Texts{"model.embed_dim", "model.position.rotary.kind"}));
    add_overrides(settings, {"model.position.lag_bias.sectors=lc", "model.embed_dim=16"});
    EXPECT_EQ(paths_of(settings),
              (Texts{"model.position.rotary.kind", "model.position.lag_bias.sectors", "model.embed_dim"}));
    EXPECT_EQ(settings[2].value, "16");

    settings = read(composed);
    add_overrides(settings, {"model.position={rotary: {kind: rope}}"});
    EXPECT_EQ(paths_of(settings), (Texts{"model.embed_dim", "model.position.rotary.kind"}));
    EXPECT_EQ(settings[1].value, "rope");
    EXPECT_EQ(settings[1].where, "--set model.position={rotary: {kind: rope}}");

    // A name that another begins with is neither above nor below it.
    settings.clear();
    add_overrides(settings, {"a.bc=1", "a.b=2", "a.b-c=3", "a.b.c=4"});
    EXPECT_EQ(paths_of(settings), (Texts{"a.bc", "a.b-c", "a.b.c"}));
}

TEST_F(ConfigTest, FormsOfOverrides) {
    std::vector<Setting> settings;
    add_overrides(settings, {"a.b= 3 ", " c =x:y z", "d={}", "e=", "f=[a, 'b']", "g=\"1\"", "h={x: 1, y: {z: [2]}}"});
    ASSERT_EQ(paths_of(settings), (Texts{"a.b", "c", "d", "e", "f", "g", "h.x", "h.y.z"}));
    EXPECT_EQ(settings[0].value, "3");
    EXPECT_EQ(settings[0].where, "--set a.b= 3 ");
    EXPECT_EQ(settings[1].value, "x:y z");
    EXPECT_TRUE(settings[2].is_empty_map);
    EXPECT_TRUE(settings[3].is_null);
    EXPECT_EQ(settings[4].items, (Texts{"a", "b"}));
    EXPECT_EQ(settings[4].item_is_quoted, (std::vector<bool>{false, true}));
    EXPECT_TRUE(settings[5].is_quoted);
    EXPECT_EQ(settings[6].value, "1");
    EXPECT_EQ(settings[7].items, (Texts{"2"}));
}

TEST_F(ConfigTest, BadOverrides) {
    EXPECT_EQ(set_error("x"), "--set x: no '='; wanted KEY=VALUE");
    EXPECT_EQ(set_error(""), "--set : no '='; wanted KEY=VALUE");
    EXPECT_EQ(set_error("=3"), "--set =3: no key before '='; wanted KEY=VALUE");
    EXPECT_EQ(set_error("  =3"), "--set   =3: no key before '='; wanted KEY=VALUE");
    EXPECT_EQ(set_error("train.lr=fast"), "--set train.lr=fast: train.lr: 'fast' is not a number");
    EXPECT_EQ(set_error("train.lr=[1, 2").substr(0, 41), "--set train.lr=[1, 2: malformed YAML: end");
    EXPECT_EQ(set_error("train.lr={a: 1, a: 2}"), "--set train.lr={a: 1, a: 2}: train.lr.a: given twice");
    EXPECT_EQ(set_error("train={steps.x: 1}"),
              "--set train={steps.x: 1}: train.steps.x: a dot in a key; write it as sections, steps: {x: ...}");
    for (const std::string value : {"a: 1", "- 1"})
        EXPECT_EQ(
            set_error("train.lr=" + value),
            "--set train.lr=" + value +
                ": train.lr: malformed value; wanted one value, [a, b] or {a: 1}, and quotes around a text with ': '");
    EXPECT_EQ(set_error("train.lr=1\n---\n2"), "--set train.lr=1 --- 2: malformed YAML, or more than one document");
    EXPECT_EQ(set_error("train.lr=a\n\tb"), "--set train.lr=a  b: train.lr: 'a b' is not a number");
}

TEST_F(ConfigTest, LongValuesAreCutInMessages) {
    const std::string message = error("train:\n  lr: " + std::string(5000, 'x') + "\n");
    EXPECT_EQ(message, "x.yaml:2: train.lr: '" + std::string(80, 'x') + "...' is not a number");
}

Values unusual_values() {
    Values v;
    v.shuffle = true;
    v.steps = INT64_MAX;
    v.batch = -5;
    v.lr = 0.1 + 0.2;
    v.corpus = "a: b # c";
    v.gate_init = "fj";
    v.data_seed = 0;
    v.contexts = {};
    v.sectors = {"affine", "lc"};
    return v;
}

void expect_equal(const Values& a, const Values& b) {
    EXPECT_EQ(a.shuffle, b.shuffle);
    EXPECT_EQ(a.steps, b.steps);
    EXPECT_EQ(a.batch, b.batch);
    EXPECT_EQ(a.lr, b.lr);
    EXPECT_EQ(a.clip, b.clip);
    EXPECT_EQ(a.corpus, b.corpus);
    EXPECT_EQ(a.gate_init, b.gate_init);
    EXPECT_EQ(a.rotary_kind, b.rotary_kind);
    EXPECT_EQ(a.data_seed, b.data_seed);
    EXPECT_EQ(a.embed_dim, b.embed_dim);
    EXPECT_EQ(a.contexts, b.contexts);
    EXPECT_EQ(a.sectors, b.sectors);
}

// The table with only the composed form of model.position, without limits that unusual_values breaks.
std::vector<Key> writable_table(Values& v) {
    std::vector<Key> table = table_of(v);
    std::erase_if(table, [](const Key& key) { return key.path == "model.position"; });
    for (Key& key : table) key.min = -kInfinity;
    return table;
}

TEST_F(ConfigTest, YamlIsReadable) {
    EXPECT_EQ(to_yaml(writable_table(values)),
              "data:\n  corpus: \"\"\n"
              "model:\n  position:\n    rotary:\n      kind: rope\n    lag_bias:\n      sectors: []\n  embed_dim: 96\n "
              " gate_init: \"\"\n"
              "train:\n  steps: 300\n  batch: 32\n  lr: 0.003\n  clip: inf\n  shuffle: false\n  data_seed: null\n"
              "eval:\n  contexts: [1024, 8192]\n");
    EXPECT_EQ(to_yaml({}), "{}\n");
    double tiny = 1e-8;
    EXPECT_EQ(to_yaml({{.path = "eps", .target = &tiny, .meaning = ""}}), "eps: 1.0e-08\n");
}

TEST_F(ConfigTest, YamlRoundTrip) {
    for (Values original : {Values(), unusual_values()}) {
        Values again = unusual_values();
        if (original.shuffle) again = Values();
        apply_settings(read(to_yaml(writable_table(original))), writable_table(again));
        expect_equal(again, original);
    }
}

TEST_F(ConfigTest, JsonRoundTrip) {
    for (Values original : {Values(), unusual_values()}) {
        Values again = unusual_values();
        if (original.shuffle) again = Values();
        const std::string json = to_json(writable_table(original));
        EXPECT_EQ(json.find('\n'), std::string::npos);
        apply_settings(settings_from_json(json, "x"), writable_table(again));
        expect_equal(again, original);
    }
    EXPECT_EQ(to_json(writable_table(values)),
              R"({"data":{"corpus":""},"model":{"position":{"rotary":{"kind":"rope"},"lag_bias":{"sectors":[]}},)"
              R"("embed_dim":96,"gate_init":""},)"
              R"("train":{"steps":300,"batch":32,"lr":0.003,"clip":"inf",)"
              R"("shuffle":false,"data_seed":null},"eval":{"contexts":[1024,8192]}})");
}

TEST_F(ConfigTest, DoublesAndTextsRoundTripExactly) {
    uint64_t state = 1;  // bit patterns of doubles from a linear congruential generator, finite ones only
    std::vector<double> doubles = {
        0.0, -0.0, 1e-8, 1e16, 1e22, 5e-324, 1.7976931348623157e308, 2.2250738585072014e-308, -kInfinity, 3.0, 1e15};
    while (doubles.size() < 300) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        double x;
        std::memcpy(&x, &state, sizeof x);
        if (std::isfinite(x)) doubles.push_back(x);
    }
    const Texts texts = {"",
                         " ",
                         " a",
                         "a ",
                         "null",
                         "~",
                         "Null",
                         "true",
                         "off",
                         "123",
                         "1e5",
                         "-",
                         "- a",
                         "a: b",
                         "a:",
                         ":a",
                         "#x",
                         "a #b",
                         "[a]",
                         "{a}",
                         "a, b",
                         ",",
                         "'",
                         "\"",
                         "\\",
                         "a\nb",
                         "a\n",
                         "\n",
                         "\t",
                         "a\tb",
                         std::string("\0", 1),
                         "\x01\x7f",
                         "\u00e9\u4e2d\U0001f600",
                         "\ufeff",
                         "\u2028",
                         "\u0085",
                         "*a",
                         "&a",
                         "!a",
                         "%a",
                         "@a",
                         "`a",
                         "|",
                         ">",
                         "?",
                         "? a",
                         "---",
                         "...",
                         "--- a",
                         "inf",
                         "nan",
                         ".inf",
                         "<<",
                         "=",
                         "a=b",
                         "C:\\x",
                         "0x10",
                         std::string(500, 'w') + " " + std::string(500, 'z')};
    for (size_t i = 0; i < doubles.size(); ++i) {
        double number = doubles[i], number_again = 7;
        std::string text = texts[i % texts.size()], text_again = "?";
        Texts list = {text, "x", texts[i % 7]}, list_again;
        const std::vector<Key> from = {{.path = "s.number", .target = &number, .meaning = ""},
                                       {.path = "s.text", .target = &text, .meaning = ""},
                                       {.path = "list", .target = &list, .meaning = ""}};
        const std::vector<Key> to = {
            {.path = "s.number", .target = &number_again, .meaning = "", .allows_infinity = true},
            {.path = "s.text", .target = &text_again, .meaning = ""},
            {.path = "list", .target = &list_again, .meaning = ""}};
        for (const bool json : {false, true}) {
            number_again = 7;
            text_again = "?";
            list_again = {};
            const std::string written = json ? to_json(from) : to_yaml(from);
            ASSERT_NO_THROW(apply_settings(json ? settings_from_json(written, "x") : read(written), to)) << written;
            EXPECT_EQ(number_again, number) << written;
            EXPECT_EQ(std::signbit(number_again), std::signbit(number)) << written;
            EXPECT_EQ(text_again, text) << written;
            EXPECT_EQ(list_again, list) << written;
        }
    }
}

TEST_F(ConfigTest, BadJson) {
    const auto message = [](const std::string& json, const std::vector<Key>& table) -> std::string {
        try {
            apply_settings(settings_from_json(json, "a.safetensors"), table);
        } catch (const Error& e) {
            EXPECT_EQ(e.exit_code, kExitUsage);
            return e.what();
        }
        return "no error";
    };
    const std::vector<Key> table = table_of(values);
    EXPECT_EQ(message("{\"train\":", table).substr(0, 29), "a.safetensors: malformed JSON");
    EXPECT_EQ(message("[1]", table), "a.safetensors: found JSON of type array; wanted an object");
    EXPECT_EQ(message(R"({"train":{"lr":"0.1"}})", table),
              "a.safetensors: train.lr: '0.1' is in quotes and thus not a number");
    EXPECT_EQ(message(R"({"train":{"shuffle":"true"}})", table),
              "a.safetensors: train.shuffle: 'true' is not true or false");
    EXPECT_EQ(message(R"({"train":{"stepz":1}})", table),
              "a.safetensors: train.stepz: unknown key; did you mean train.steps?");
    EXPECT_EQ(message(R"({"eval":{"contexts":[[1]]}})", table),
              "a.safetensors: eval.contexts: a list of lists or maps; wanted single values");
    EXPECT_EQ(message(R"({"eval":{"contexts":[null]}})", table), "a.safetensors: eval.contexts: null in a list");
    EXPECT_EQ(message(R"({"data":{"corpus":null}})", table), "a.safetensors: data.corpus: null is not a text");
    EXPECT_EQ(message(R"({"train":{},"eval":{"contexts":[3]}})", table), "no error");
    EXPECT_EQ(values.contexts, (Integers{3}));
    EXPECT_EQ(message("{}", table), "no error");
}

TEST_F(ConfigTest, WritingBothFormsOfAKeyIsAnErrorOfTheProgram) {
    int64_t n = 0;
    for (const std::vector<std::string>& paths :
         std::vector<Texts>{{"a", "a.b"}, {"a.b", "a"}, {"a.b", "a.b"}, {"a.b", "a.b.c.d"}}) {
        std::vector<Key> table;
        for (const std::string& path : paths) table.push_back({.path = path, .target = &n, .meaning = ""});
        EXPECT_THROW(to_yaml(table), std::logic_error);
        EXPECT_THROW(to_json(table), std::logic_error);
    }
}

TEST_F(ConfigTest, HelpListsEveryKey) {
    std::vector<Key> table = table_of(values);
    table.push_back({.path = "data.fraction",
                     .target = &values.lr,
                     .meaning = "a key that comes late but belongs to the first section; its meaning needs more than "
                                "one line to be said in full, as it goes on"});
    table[1].choices = {"none",   "rope",        "rope_pi",   "rope_ntk",  "rope_yarn", "pj_rotary",
                        "affine", "rope_affine", "fj_affine", "lc_affine", "full"};
    std::istringstream help(help_text(table));
    Texts lines, first_words;
    for (std::string line; std::getline(help, line);) {
        EXPECT_LT(line.size(), 140u) << line;
        EXPECT_TRUE(line.empty() || line.back() != ' ') << line;
        lines.push_back(line);
        std::istringstream words(line);
        if (std::string word; line.size() > 2 && line[2] != ' ' && words >> word) first_words.push_back(word);
    }
    EXPECT_EQ(first_words,
              (Texts{"key", "data.corpus", "data.fraction", "model.position", "model.position.rotary.kind",
                     "model.position.lag_bias.sectors", "model.embed_dim", "model.gate_init", "train.steps",
                     "train.batch", "train.lr", "train.clip", "train.shuffle", "train.data_seed", "eval.contexts"}));
    const auto line_of = [&](const std::string& key) {
        for (const std::string& line : lines)
            if (line.starts_with("  " + key + " ")) return line;
        return std::string();
    };
    const size_t range_column = lines[0].find("range or choices"), meaning_column = lines[0].find("meaning");
    EXPECT_EQ(line_of("train.steps").find(">= 1"), range_column);
    EXPECT_EQ(line_of("train.steps").find("optimizer steps"), meaning_column);
    EXPECT_EQ(line_of("train.lr").find("> 0 and <= 10"), range_column);
    EXPECT_EQ(line_of("train.lr").find("0.003"), lines[0].find("default"));
    EXPECT_EQ(line_of("train.lr").find("number"), lines[0].find("type"));
    EXPECT_NE(line_of("eval.contexts").find("[1024, 8192]"), std::string::npos);
    EXPECT_NE(line_of("train.data_seed").find("integer or null"), std::string::npos);
    EXPECT_NE(line_of("model.gate_init").find("by the sectors"), std::string::npos);
    EXPECT_NE(line_of("data.corpus").find("\"\""), std::string::npos);
    EXPECT_NE(line_of("model.position").find("full"), std::string::npos);
    EXPECT_EQ(line_of("model.position").find("none, rope, rope_pi"), range_column);
    std::string joined;
    for (const std::string& line : lines) joined += line + "\n";
    for (const std::string& choice : table[1].choices) EXPECT_NE(joined.find(choice), std::string::npos);
    EXPECT_NE(joined.find("as it goes on"), std::string::npos);
}

TEST(Nearest, IsNearEnoughToBeMeant) {
    const Texts names = {"none", "rope", "rope_ntk", "lc_affine", "fj_affine"};
    EXPECT_EQ(nearest("rop", names), "rope");
    EXPECT_EQ(nearest("rpoe", names), "rope");
    EXPECT_EQ(nearest("ROPE", names), "rope");
    EXPECT_EQ(nearest("lc-affine", names), "lc_affine");
    EXPECT_EQ(nearest("rope_nkt", names), "rope_ntk");
    EXPECT_EQ(nearest("alibi", names), "");
    EXPECT_EQ(nearest("", names), "");
    EXPECT_EQ(nearest("x", {"y"}), "");
    EXPECT_EQ(nearest("x", {}), "");
    EXPECT_EQ(nearest(std::string(100000, 'x'), names), "");
}

}  // namespace
}  // namespace jetlag
