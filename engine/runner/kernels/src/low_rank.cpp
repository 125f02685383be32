// Products of low-rank adapters, added to the outputs of a linear layer. Each token is computed for
// itself, with a fixed order of additions: its bits do not depend on the batch.

#include "recurrent.h"

#include <vector>

using namespace baton;

namespace {

constexpr std::int64_t kRowBlock = 256;  // rows of a unit of work

class LowRank {
  public:
    explicit LowRank(const LowRankArgs& args) : args_(args) {
        float* hidden = args.hidden_buf;
        for (std::int64_t group = 0; group < args.num_groups; ++group)
            for (std::int64_t p = args.first_parts[group]; p < args.first_parts[group + 1]; ++p) {
                hidden_.push_back(hidden);
                const std::int64_t rank = args.parts[p].rank;
                hidden += rank * num_tokens(group);
                for (std::int64_t row = 0; row < rank; ++row) downs_.push_back({group, p, row});
            }
    }

    void run() const {
        const std::int64_t average = args_.first_tokens[args_.num_groups] / args_.num_groups + 1;
        parallel_for(std::int64_t(downs_.size()), args_.num_columns * average, args_.num_threads,
                     [this](std::int64_t at, std::int64_t end) {
                         for (; at < end; ++at) project(downs_[at]);
                     });
        const std::int64_t num_blocks = (args_.num_rows + kRowBlock - 1) / kRowBlock;
        parallel_for(num_blocks * args_.num_groups, kRowBlock * average * kTypicalRank,
                     args_.num_threads, [=, this](std::int64_t at, std::int64_t end) {
                         for (; at < end; ++at) add(at / num_blocks, at % num_blocks * kRowBlock);
                     });
    }

  private:
    static constexpr std::int64_t kTypicalRank = 16;

    // A row of a part's first matrix.
    struct Down {
        std::int64_t group, part, row;
    };

    std::int64_t num_tokens(std::int64_t group) const {
        return args_.first_tokens[group + 1] - args_.first_tokens[group];
    }

    // Product of a row with each token of its group. Results are [tokens, rank].
    void project(const Down& down) const {
        const LowRankPart& part = args_.parts[down.part];
        const Bf16* const row = part.down + down.row * args_.num_columns;
        const std::int64_t* const tokens = args_.tokens + args_.first_tokens[down.group];
        float* const dst = hidden_[down.part] + down.row;
        for (std::int64_t i = 0; i < num_tokens(down.group); ++i)
            dst[i * part.rank] = dot(args_.src + tokens[i] * args_.num_columns, row);
    }

    float dot(const Bf16* token, const Bf16* row) const {
        constexpr int kSums = 4;
        F32x16 sums[kSums] = {};
        const std::int64_t size = args_.num_columns;
        std::int64_t i = 0;
        for (; i + kSums * kLanes <= size; i += kSums * kLanes)
            for (int s = 0; s < kSums; ++s)
                for_each_reg([&](int r) {
                    const std::int64_t at = i + s * kLanes + r * kRegLanes;
                    reg(sums[s], r) += load_reg(token + at) * load_reg(row + at);
                });
        for (; i < size; i += kLanes)
            sums[0] += load_some(token + i, size - i) * load_some(row + i, size - i);
        return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }

    // Adds the products of all parts of a group to a block of rows of its tokens.
    void add(std::int64_t group, std::int64_t first) const {
        const std::int64_t end = std::min(first + kRowBlock, args_.num_rows);
        const std::int64_t* const tokens = args_.tokens + args_.first_tokens[group];
        for (std::int64_t p = args_.first_parts[group]; p < args_.first_parts[group + 1]; ++p) {
            const LowRankPart& part = args_.parts[p];
            const std::int64_t low = std::max(first, part.first_row);
            const std::int64_t high = std::min(end, part.first_row + part.num_rows);
            for (std::int64_t i = 0; low < high && i < num_tokens(group); ++i)
                add_part(part, hidden_[p] + i * part.rank, args_.dst + tokens[i] * args_.num_rows,
                         low, high);
        }
    }

    static void add_part(const LowRankPart& part, const float* hidden, Bf16* dst, std::int64_t low,
                         std::int64_t high) {
        for (std::int64_t row = low; row < high; row += kLanes) {
            const std::int64_t left = high - row;
            const Bf16* const up = part.up + (row - part.first_row);
            F32x16 total = load_some(dst + row, left);
            for (std::int64_t r = 0; r < part.rank; ++r) {
                F32x16 numbers = load_some(up + r * part.num_rows, left);
                for_each_reg([&](int i) { reg(total, i) += reg(numbers, i) * hidden[r]; });
            }
            store_some(dst + row, total, left);
        }
    }

    const LowRankArgs& args_;
    std::vector<float*> hidden_;  // by part
    std::vector<Down> downs_;
};

}  // namespace

extern "C" void baton_add_low_rank(const LowRankArgs* args) { LowRank(*args).run(); }
