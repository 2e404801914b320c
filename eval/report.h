// The forms in which evaluations are reported. Every one states the protocol.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "eval/evaluate.h"

namespace jetlag {

// An aligned table for the terminal.
std::string evaluation_table(const std::vector<Evaluation>& list, const Protocol& protocol);

// One row per checkpoint and length, with the published study's column names first and the protocol last. What a
// checkpoint does not have (gates of a model without a lag bias, statistics not asked for) is an empty cell.
std::string evaluation_csv(const std::vector<Evaluation>& list, const Protocol& protocol);

// A list of objects; what a checkpoint does not have is left out.
std::string evaluation_json(const std::vector<Evaluation>& list, const Protocol& protocol);

// Mean loss per bucket of positions: [0, 1), [1, 2), [2, 4), [4, 8), ... up to the context length.
std::string loss_by_position_csv(const std::vector<Evaluation>& list, const Protocol& protocol);

// Draws loss against context length, one line per checkpoint, with gnuplot. Errors: gnuplot fails.
void draw_plot(const std::filesystem::path& svg, const std::vector<Evaluation>& list, const Protocol& protocol);

}  // namespace jetlag
