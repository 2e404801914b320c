#include "bridge/evaluate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "src/error.h"
#include "src/text_table.h"

namespace jetlag {

using Json = nlohmann::ordered_json;

BridgeEvaluation evaluate_student(const Model& model, const BridgeConfig& config, int64_t T, int64_t batches,
                                  TorchGenerator& generator) {
    const int64_t B = config.train.batch;
    Activations acts = make_activations(model.shape, B, T, Mode::inference, true);
    BridgeEvaluation mean;
    mean.context = T;
    mean.batches = batches;
    const double share = 1 / static_cast<double>(batches), rows = static_cast<double>(batches * B);
    int64_t correct = 0, ones = 0;
    for (int64_t n = 0; n < batches; n++) {
        const QueryBatch batch = draw_queries(generator, config.teacher, config.train.context, B, T);
        const BatchResult result = evaluate_batch(model, acts, batch.tokens, batch.labels, B, T, T);
        if (!std::isfinite(result.loss))
            fail("the loss at length {} is {}: the first tensor with a NaN or infinity is {}", T,
                 std::fabs(result.loss), first_nonfinite_tensor(model, acts, nullptr, B, T));
        mean.loss += share * result.loss;
        mean.attention_entropy += share * result.entropy.value();
        mean.attention_effective_support += share * result.effective_support.value();
        for (size_t b = 0; b < static_cast<size_t>(B); b++) {
            const double ahead = static_cast<double>(result.logits[2 * b + 1]) - result.logits[2 * b];
            mean.mean_confidence += 1 / rows / (1 + std::exp(-std::fabs(ahead)));
            correct += (ahead > 0) == (batch.labels[b] == 1);
            ones += batch.labels[b];
        }
    }
    mean.accuracy = static_cast<double>(correct) / rows;
    mean.label_balance = static_cast<double>(ones) / rows;
    return mean;
}

std::string bridge_table(const std::vector<StudentReport>& list) {
    std::vector<std::vector<std::string>> rows = {
        {"run", "sector", "length", "loss", "accuracy", "balance", "confidence", "entropy", "support", "teacher's"}};
    for (const StudentReport& report : list)
        for (const BridgeEvaluation& e : report.evaluations)
            rows.push_back(
                {report.name, report.config.model.sector, std::to_string(e.context), fmt::format("{:.4f}", e.loss),
                 fmt::format("{:.4f}", e.accuracy), fmt::format("{:.3f}", e.label_balance),
                 fmt::format("{:.3f}", e.mean_confidence), fmt::format("{:.3f}", e.attention_entropy),
                 fmt::format("{:.1f}", e.attention_effective_support),
                 fmt::format(
                     "{:.1f}",
                     teacher_stats(report.config.teacher, report.config.train.context, e.context).effective_support)});
    return aligned_table(rows, 2);
}

std::string bridge_csv(const std::vector<StudentReport>& list) {
    std::vector<std::string> figures;
    for (const StudentReport& report : list)
        for (const auto& figure : report.lag_bias)
            if (std::find(figures.begin(), figures.end(), figure.first) == figures.end())
                figures.push_back(figure.first);
    std::string text = "run,seed,sector,teacher,target,train_len,train_seq_lens,eval_len,omega_cycles,attention_lambda";

    text +=
        ",initial_loss,initial_accuracy,loss,accuracy,label_balance,mean_confidence,attention_entropy,attention_"
        "effective_support,teacher_entropy,"
        "teacher_effective_support,teacher_kernel_norm";
    for (const std::string& name : figures) text += "," + name;
    text += ",batches,batch,steps\n";
    for (const StudentReport& report : list) {
        const BridgeConfig& c = report.config;
        const TeacherStats teacher = teacher_stats(c.teacher, c.train.context, c.train.context);
        for (const BridgeEvaluation& e : report.evaluations) {
            text += fmt::format("{},{},{},{},{},{},{},{},{},{}", csv_cell(report.name), c.train.seed, c.model.sector,
                                c.teacher.kind, c.teacher.target, c.train.context,
                                csv_cell(fmt::format("{}", fmt::join(training_lengths(c), ","))), e.context,
                                c.teacher.omega_cycles, c.teacher.attention_lambda);
            text +=
                report.initial.batches > 0 ? fmt::format(",{},{}", report.initial.loss, report.initial.accuracy) : ",,";
            text += fmt::format(",{},{},{},{},{},{},{},{},{}", e.loss, e.accuracy, e.label_balance, e.mean_confidence,
                                e.attention_entropy, e.attention_effective_support, teacher.entropy,
                                teacher.effective_support, teacher.kernel_norm);
            for (const std::string& name : figures) {
                text += ",";
                for (const auto& figure : report.lag_bias)
                    if (figure.first == name) text += fmt::format("{}", figure.second);
            }
            text += fmt::format(",{},{},{}\n", e.batches, c.train.batch, c.train.steps);
        }
    }
    return text;
}

static Json evaluation_object(const BridgeEvaluation& e) {
    return {{"context", e.context},
            {"batches", e.batches},
            {"loss", e.loss},
            {"accuracy", e.accuracy},
            {"label_balance", e.label_balance},
            {"mean_confidence", e.mean_confidence},
            {"attention_entropy", e.attention_entropy},
            {"attention_effective_support", e.attention_effective_support}};
}

static BridgeEvaluation parse_evaluation(const Json& object) {
    BridgeEvaluation e;
    e.context = object.at("context");
    e.batches = object.at("batches");
    e.loss = object.at("loss");
    e.accuracy = object.at("accuracy");
    e.label_balance = object.at("label_balance");
    e.mean_confidence = object.at("mean_confidence");
    e.attention_entropy = object.at("attention_entropy");
    e.attention_effective_support = object.at("attention_effective_support");
    return e;
}

std::string bridge_report_json(const StudentReport& report) {
    const BridgeConfig& c = report.config;
    Json object = {{"run", report.name}, {"config", Json::parse(bridge_json(c))}};
    const TeacherStats teacher = teacher_stats(c.teacher, c.train.context, c.train.context);
    object["teacher"] = {{"entropy", teacher.entropy},
                         {"effective_support", teacher.effective_support},
                         {"kernel_norm", teacher.kernel_norm}};
    object["initial"] = report.initial.batches > 0 ? evaluation_object(report.initial) : Json();
    for (const auto& [name, value] : report.lag_bias) object["lag_bias"][name] = value;
    object["evaluations"] = Json::array();
    for (const BridgeEvaluation& e : report.evaluations) object["evaluations"].push_back(evaluation_object(e));
    // A path that is not UTF-8 is written with U+FFFD.
    return object.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

StudentReport parse_bridge_report(const std::string& json, const std::string& file) try {
    const Json object = Json::parse(json);
    StudentReport report;
    report.name = object.at("run");
    report.config = make_bridge_config(settings_from_json(object.at("config").dump(), file), false);
    if (!object.at("initial").is_null()) report.initial = parse_evaluation(object.at("initial"));
    if (object.contains("lag_bias"))
        for (const auto& [name, value] : object.at("lag_bias").items()) report.lag_bias.push_back({name, value});
    for (const Json& e : object.at("evaluations")) report.evaluations.push_back(parse_evaluation(e));
    return report;
} catch (const nlohmann::json::exception& e) {
    fail("{}: not an evaluation of the bridge: {}", file, one_line(e.what()));
}

}  // namespace jetlag
