// Many runs of the bridge: every combination of targets, lambdas, sectors and seeds, and what they show together.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "bridge/training.h"

namespace jetlag {

struct SweepRun {
    std::string name;     // of its folder
    BridgeConfig config;  // of this run
    // The run whose numbers are this one's: another name for the same student. "": its own.
    std::string same_as;
};

// In the order targets, lambdas, sectors, seeds.
std::vector<SweepRun> sweep_runs(const BridgeConfig& config);

// Trains what is not trained yet, `jobs` runs at a time, each in a process of its own with its share of the threads and
// its output in FOLDER/NAME/output.txt; reads what is. Errors: of a run, with the last line that it wrote; a signal,
// after every run has saved what it has.
std::vector<StudentReport> run_sweep(const std::vector<SweepRun>& runs, const std::filesystem::path& folder, int jobs);

// A value of a sweep over its seeds; the deviation is the sample one (n - 1), 0 of one seed.
struct SweepCell {
    std::string target, sector;
    double lambda = 0;
    int64_t context = 0, seeds = 0;
    double accuracy = 0, accuracy_deviation = 0, loss = 0, loss_deviation = 0, support = 0, support_deviation = 0;
    double teacher_support = 0;  // of softmax(lambda K) at this length
};
std::vector<SweepCell> sweep_cells(const std::vector<StudentReport>& reports);

// Accuracies to compare with: a CSV file with the columns target, sector, eval_len and accuracy. Errors (exit code 2)
// name the file and the line.
struct PublishedAccuracy {
    std::string target, sector;
    int64_t context;
    double accuracy;
};
std::vector<PublishedAccuracy> read_published(const std::filesystem::path& file);

// Tables of accuracies, mean +- deviation, one per length: a row for each sector, a column for each target and lambda.
// With published values three lines in a cell's place: ours, theirs, the difference.
std::string sweep_table(const std::vector<SweepCell>& cells, const std::vector<PublishedAccuracy>& published);
std::string sweep_csv(const std::vector<SweepCell>& cells, const std::vector<PublishedAccuracy>& published);

// Accuracy against length, a panel for each target, a line for each sector; of a sweep over lambdas accuracy against
// the teacher's support, a panel for each length, and the supports of teacher and student against lambda. Errors:
// gnuplot fails.
void draw_sweep(const std::filesystem::path& svg, const std::vector<SweepCell>& cells);

}  // namespace jetlag
