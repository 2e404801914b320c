#include "eval/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "src/gnuplot.h"
#include "src/text_table.h"

namespace jetlag {

static std::string windows_name(const Protocol& protocol) {
    return protocol.windows == Windows::random ? "random" : "sequential";
}

static std::string targets_name(const Protocol& protocol) {
    return protocol.last_targets == 0 ? "all" : fmt::format("last:{}", protocol.last_targets);
}

static int64_t batch_count(const Evaluation& e, const Protocol& protocol) {
    return (e.windows + protocol.batch - 1) / protocol.batch;
}

// The checkpoint of a run folder is known by its folder.
static std::string short_name(const std::string& checkpoint) {
    const std::filesystem::path path(checkpoint);
    return path.filename() == "checkpoint.safetensors" && path.has_parent_path() ? path.parent_path().string()
                                                                                 : checkpoint;
}

// ---------------------------------------------------------------------------------------------------------------

using Table = std::vector<std::vector<std::string>>;

std::string evaluation_table(const std::vector<Evaluation>& list, const Protocol& protocol) {
    std::string text = fmt::format("protocol: {}\n", protocol_text(protocol));
    std::vector<std::string> header = {"checkpoint", "position", "context",   "loss",
                                       "ppl",        "delta",    "logit std", "|logit| max"};
    if (protocol.attention_stats) header.insert(header.end(), {"entropy", "support", "mean lag"});
    header.insert(header.end(), {"windows", "targets", "disjoint", "skipped", "seconds"});
    Table rows = {header};
    for (const Evaluation& e : list) {
        std::vector<std::string> row = {short_name(e.checkpoint),
                                        e.position,
                                        std::to_string(e.context),
                                        fmt::format("{:.4f}", e.loss),
                                        fmt::format("{:.2f}", e.perplexity),
                                        e.delta_loss ? fmt::format("{:+.4f}", *e.delta_loss) : "-",
                                        fmt::format("{:.3f}", e.logit_std),
                                        fmt::format("{:.2f}", e.logit_abs_max)};
        if (protocol.attention_stats)
            row.insert(row.end(), {fmt::format("{:.3f}", *e.entropy), fmt::format("{:.1f}", *e.effective_support),
                                   fmt::format("{:.1f}", *e.mean_lag)});
        row.insert(row.end(),
                   {std::to_string(e.windows), std::to_string(e.targets_scored), std::to_string(e.disjoint_windows),
                    fmt::format("{:.0f}%", 100 * e.skipped), fmt::format("{:.2f}", e.seconds)});
        rows.push_back(row);
    }
    text += aligned_table(rows, 2);

    // Gates, slopes and masses do not depend on the length: once per checkpoint.
    std::vector<const Evaluation*> with_bias;
    for (const Evaluation& e : list)
        if (!e.lag_bias.empty() && (with_bias.empty() || with_bias.back()->checkpoint != e.checkpoint))
            with_bias.push_back(&e);
    if (!with_bias.empty()) {
        size_t longest = 0;
        for (size_t i = 0; i < with_bias.size(); i++)
            if (with_bias[i]->lag_bias.size() > with_bias[longest]->lag_bias.size()) longest = i;
        Table figures = {{"lag bias", "position"}};
        for (const auto& figure : with_bias[longest]->lag_bias) figures[0].push_back(figure.first);
        for (const Evaluation* e : with_bias) {
            std::vector<std::string> row = {short_name(e->checkpoint), e->position};
            for (size_t c = 2; c < figures[0].size(); c++) {
                std::string cell = "-";
                for (const auto& [name, value] : e->lag_bias)
                    if (name == figures[0][c]) cell = fmt::format("{:.4g}", value);
                row.push_back(cell);
            }
            figures.push_back(row);
        }
        text += "\n" + aligned_table(figures, 2);
    }
    return text;
}

// ---------------------------------------------------------------------------------------------------------------

static std::string number(double value) {
    return fmt::format("{}", value);
}
static std::string number(const std::optional<double>& value) {
    return value ? number(*value) : "";
}

std::string evaluation_csv(const std::vector<Evaluation>& list, const Protocol& protocol) {
    int64_t max_order = 0;
    for (const Evaluation& e : list) max_order = std::max(max_order, e.max_order);
    std::vector<std::string> lag_bias = {"gate_fj", "gate_affine", "gate_lc", "affine_slope_mean"};
    for (const char* sector : {"fj", "lc"})
        for (int64_t r = 0; r <= max_order; r++) lag_bias.push_back(fmt::format("{}_mass_r{}", sector, r));

    std::string text =
        "method,seed,train_len,eval_len,max_order,train_eval_loss,loss,ppl,delta_loss,attention_entropy,"
        "attention_effective_support,average_attention_distance,logit_std,logit_abs_max";
    for (const std::string& name : lag_bias) text += "," + name;
    text +=
        ",checkpoint,windows,batches,batch,window_count,eval_seed,targets,targets_scored,disjoint_windows,seconds,"
        "attention_skipped\n";
    for (const Evaluation& e : list) {
        text += fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},{}", csv_cell(e.position), e.train_seed,
                            e.train_len, e.context, e.max_order, number(e.train_len_loss), number(e.loss),
                            number(e.perplexity), number(e.delta_loss), number(e.entropy), number(e.effective_support),
                            number(e.mean_lag), number(e.logit_std), number(e.logit_abs_max));
        for (const std::string& name : lag_bias) {
            text += ",";
            for (const auto& figure : e.lag_bias)
                if (figure.first == name) text += number(figure.second);
        }
        text += fmt::format(",{},{},{},{},{},{},{},{},{},{},{}\n", csv_cell(e.checkpoint), windows_name(protocol),
                            batch_count(e, protocol), protocol.batch, e.windows, protocol.seed, targets_name(protocol),
                            e.targets_scored, e.disjoint_windows, number(e.seconds), number(e.skipped));
    }
    return text;
}

std::string evaluation_json(const std::vector<Evaluation>& list, const Protocol& protocol) {
    nlohmann::ordered_json array = nlohmann::ordered_json::array();
    for (const Evaluation& e : list) {
        nlohmann::ordered_json object = {
            {"checkpoint", e.checkpoint},
            {"position", e.position},
            {"train_seed", e.train_seed},
            {"train_len", e.train_len},
            {"max_order", e.max_order},
            {"context", e.context},
            {"loss", e.loss},
            {"perplexity", e.perplexity},
            {"logit_std", e.logit_std},
            {"logit_abs_max", e.logit_abs_max},
        };
        if (e.train_len_loss) object["train_len_loss"] = *e.train_len_loss;
        if (e.delta_loss) object["delta_loss"] = *e.delta_loss;
        if (e.entropy) object["entropy"] = *e.entropy;
        if (e.effective_support) object["effective_support"] = *e.effective_support;
        if (e.mean_lag) object["mean_lag"] = *e.mean_lag;
        for (const auto& [name, value] : e.lag_bias) object[name] = value;
        object["protocol"] = {{"windows", windows_name(protocol)},
                              {"batches", batch_count(e, protocol)},
                              {"batch", protocol.batch},
                              {"window_count", e.windows},
                              {"seed", protocol.seed},
                              {"targets", targets_name(protocol)},
                              {"targets_scored", e.targets_scored},
                              {"disjoint_windows", e.disjoint_windows}};
        object["attention_skipped"] = e.skipped;
        object["backend"] = backend_name();
        object["precision"] = kPrecision;
        object["seconds"] = e.seconds;
        array.push_back(object);
    }
    // A path that is not UTF-8 is written with U+FFFD.
    return array.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string loss_by_position_csv(const std::vector<Evaluation>& list, const Protocol& protocol) {
    std::string text =
        "checkpoint,position,context,begin,end,targets,loss,windows,window_count,eval_seed,scored,disjoint_windows\n";
    for (const Evaluation& e : list)
        for (int64_t begin = 0, end = 1; begin < e.context; begin = end, end *= 2) {
            end = std::min(end, e.context);
            double sum = 0;
            int64_t count = 0;
            for (int64_t t = begin; t < end; t++) {
                sum += e.loss_at[static_cast<size_t>(t)] * static_cast<double>(e.count_at[static_cast<size_t>(t)]);
                count += e.count_at[static_cast<size_t>(t)];
            }
            if (count == 0) continue;
            text += fmt::format("{},{},{},{},{},{},{},{},{},{},{},{}\n", csv_cell(e.checkpoint), csv_cell(e.position),
                                e.context, begin, end, count, number(sum / static_cast<double>(count)),
                                windows_name(protocol), e.windows, protocol.seed, targets_name(protocol),
                                e.disjoint_windows);
        }
    return text;
}

// ---------------------------------------------------------------------------------------------------------------

void draw_plot(const std::filesystem::path& svg, const std::vector<Evaluation>& list, const Protocol& protocol) {
    std::vector<std::string> checkpoints;
    for (const Evaluation& e : list)
        if (std::find(checkpoints.begin(), checkpoints.end(), e.checkpoint) == checkpoints.end())
            checkpoints.push_back(e.checkpoint);
    const char* const colours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"};
    std::string script = "set terminal svg size 900,600 dynamic background rgb 'white' font 'sans-serif,13'\n";
    // The one text in double quotes, for the line break; nothing in it comes from the user.
    script += "set title \"Held-out loss against context length\\n" + protocol_text(protocol) + "\" noenhanced\n";
    script +=
        "set xlabel 'context length (tokens)' offset 0,0.6\nset ylabel 'loss (nats per token)'\nset logscale x 2\n";
    script += "set key below noenhanced width 2 spacing 1.1\nset grid lc rgb '#dddddd'\n";
    script += "set offsets graph 0.02, graph 0.02, graph 0.05, graph 0.05\n";
    std::vector<int64_t> contexts;
    for (const Evaluation& e : list) contexts.push_back(e.context);
    std::sort(contexts.begin(), contexts.end());
    contexts.erase(std::unique(contexts.begin(), contexts.end()), contexts.end());
    std::string tics;
    for (int64_t context : contexts) tics += fmt::format("{}'{}' {}", tics.empty() ? "" : ", ", context, context);
    script += "set xtics (" + tics + ")\n";
    std::string plots;
    for (size_t i = 0; i < checkpoints.size(); i++) {
        std::vector<std::pair<int64_t, double>> points;
        std::string position;
        size_t same_position = 0;
        for (const Evaluation& e : list)
            if (e.checkpoint == checkpoints[i]) {
                points.push_back({e.context, e.loss});
                position = e.position;
            }
        for (const Evaluation& e : list)
            if (e.position == position && e.checkpoint != checkpoints[i]) same_position++;
        std::sort(points.begin(), points.end());
        script += fmt::format("$data{} << EOD\n", i);
        for (const auto& [context, loss] : points) script += fmt::format("{} {}\n", context, loss);
        script += "EOD\n";
        const std::string title =
            same_position > 0 ? fmt::format("{} ({})", position, short_name(checkpoints[i])) : position;
        // Of lines that lie on each other the later is thinner, so that all show.
        const double behind = static_cast<double>(checkpoints.size() - 1 - i);
        const double width = 2 + 5 * behind / std::max(1.0, static_cast<double>(checkpoints.size() - 1));
        plots += fmt::format("{}$data{} using 1:2 with linespoints lw {:.2f} pt 7 ps {:.2f} lc rgb '{}' title {}",
                             i > 0 ? ", " : "", i, width, 0.3 + 0.15 * width, colours[i % std::size(colours)],
                             plot_text(title));
    }
    script += "plot " + plots + "\n";

    draw_svg(svg, script);
}

}  // namespace jetlag
