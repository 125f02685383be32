// Products of low-rank adapters, added to the outputs of a linear layer. Each token is computed for
// itself, with a fixed order of additions: its bits do not depend on the batch.

#include "low_rank.h"
#include "recurrent.h"

#include <vector>

using namespace baton;

namespace {

constexpr std::int64_t kRowBlock = 256;  // rows of the outputs in a unit of work
constexpr std::int64_t kDownBlock = 8;   // rows of a first matrix in a unit of work
constexpr int kRegs = kLanes / kRegLanes;
constexpr int kTokens = 2;                      // that share the loads of a matrix
constexpr int kSums = 8;                        // registers with sums
constexpr int kUpVectors = kRegs == 4 ? 1 : 2;  // of sixteen rows

template <int kCount>
struct Sums {
    F32Reg regs[kCount][kRegs] = {};

    F32x16 vector(int index) const {
        F32x16 numbers;
        for_each_reg([&](int r) { reg(numbers, r) = regs[index][r]; });
        return numbers;
    }
};

// Sum of the lanes and of the products of the last columns, which are no whole vector.
float finish(F32x16 sums, const Bf16* token, const Bf16* row, std::int64_t left) {
    if (left > 0) {
        F32x16 numbers = load_some(token, left), weights = load_some(row, left);
        for_each_reg([&](int r) { reg(sums, r) += reg(numbers, r) * reg(weights, r); });
    }
    return sum(sums);
}

// Products of tokens with neighbouring rows. Each has sums of its own.
template <int kCount, int kRows>
void project(const Bf16* const* tokens, const Bf16* rows, std::int64_t size, float* const* dst) {
    Sums<kRows> sums[kCount];
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes)
        for (int r = 0; r < kRegs; ++r) {
            F32Reg weights[kRows];
            for (int row = 0; row < kRows; ++row)
                weights[row] = load_reg(rows + row * size + i + r * kRegLanes);
            for (int t = 0; t < kCount; ++t) {
                const F32Reg numbers = load_reg(tokens[t] + i + r * kRegLanes);
                for (int row = 0; row < kRows; ++row)
                    sums[t].regs[row][r] += numbers * weights[row];
            }
        }
    for (int t = 0; t < kCount; ++t)
        for (int row = 0; row < kRows; ++row)
            dst[t][row] =
                finish(sums[t].vector(row), tokens[t] + i, rows + row * size + i, size - i);
}

// Adds the products of neighbouring rows, which are whole vectors, to the outputs of tokens.
template <int kCount, int kVectors>
void add_rows(const Bf16* up, std::int64_t stride, std::int64_t rank, const float* const* hidden,
              Bf16* const* dst) {
    Sums<kVectors> totals[kCount];
    for (int t = 0; t < kCount; ++t)
        for (int v = 0; v < kVectors; ++v)
            for (int r = 0; r < kRegs; ++r)
                totals[t].regs[v][r] = load_reg(dst[t] + v * kLanes + r * kRegLanes);
    for (std::int64_t i = 0; i < rank; ++i)
        for (int v = 0; v < kVectors; ++v)
            for (int r = 0; r < kRegs; ++r) {
                const F32Reg numbers = load_reg(up + i * stride + v * kLanes + r * kRegLanes);
                for (int t = 0; t < kCount; ++t) totals[t].regs[v][r] += numbers * hidden[t][i];
            }
    for (int t = 0; t < kCount; ++t)
        for (int v = 0; v < kVectors; ++v) store(dst[t] + v * kLanes, totals[t].vector(v));
}

void add_last_rows(const Bf16* up, std::int64_t stride, std::int64_t rank, const float* hidden,
                   Bf16* dst, std::int64_t left) {
    F32x16 total = load_some(dst, left);
    for (std::int64_t i = 0; i < rank; ++i) {
        F32x16 numbers = load_some(up + i * stride, left);
        for_each_reg([&](int r) { reg(total, r) += reg(numbers, r) * hidden[i]; });
    }
    store_some(dst, total, left);
}

class LowRank {
  public:
    explicit LowRank(const LowRankArgs& args) : args_(args), groups_(args.groups) {
        float* hidden = args.hidden_buf;
        for (std::int64_t group = 0; group < groups_.num_groups; ++group) {
            first_parts_.push_back(std::int64_t(parts_.size()));
            const LowRankAdapter& adapter = groups_.adapters[group];
            if (args.place >= adapter.num_places) continue;
            const LowRankPlace& place = adapter.places[args.place];
            for (std::int64_t i = 0; i < place.num_parts; ++i) {
                parts_.push_back({place.parts[i], hidden, group});
                for (std::int64_t row = 0; row < place.parts[i].rank; row += kDownBlock)
                    downs_.push_back({std::int64_t(parts_.size()) - 1, row});
                hidden += place.parts[i].rank * num_tokens(group);
            }
        }
        first_parts_.push_back(std::int64_t(parts_.size()));
    }

    void run() const {
        if (downs_.empty()) return;
        const std::int64_t average = groups_.first_tokens[groups_.num_groups] / groups_.num_groups;
        parallel_for(std::int64_t(downs_.size()), kDownBlock * args_.num_columns * (average + 1),
                     args_.num_threads, [this](std::int64_t at, std::int64_t end) {
                         for (; at < end; ++at) project_block(downs_[at]);
                     });
        // Parts of a group can overlap: a thread adds all of them to its rows.
        const std::int64_t num_blocks = (args_.num_rows + kRowBlock - 1) / kRowBlock;
        parallel_for(groups_.num_groups * num_blocks, kRowBlock * kTypicalRank * (average + 1),
                     args_.num_threads, [this, num_blocks](std::int64_t at, std::int64_t end) {
                         while (at < end) {
                             const std::int64_t group = at / num_blocks, first = at % num_blocks;
                             const std::int64_t last = std::min(num_blocks, first + end - at);
                             add_blocks(group, first * kRowBlock, last * kRowBlock);
                             at += last - first;
                         }
                     });
    }

  private:
    static constexpr std::int64_t kTypicalRank = 16;

    struct GroupPart {
        const LowRankPart& part;
        float* hidden;  // [tokens, rank]
        std::int64_t group;
    };

    // Rows of a part's first matrix.
    struct Down {
        std::int64_t part, row;
    };

    std::int64_t num_tokens(std::int64_t group) const {
        return groups_.first_tokens[group + 1] - groups_.first_tokens[group];
    }

    const std::int64_t* tokens(std::int64_t group) const {
        return groups_.tokens + groups_.first_tokens[group];
    }

    void project_block(const Down& down) const {
        const GroupPart& own = parts_[down.part];
        const std::int64_t count = num_tokens(own.group);
        std::int64_t i = 0;
        for (; i + kTokens <= count; i += kTokens) project_rows<kTokens>(own, i, down.row);
        for (; i < count; ++i) project_rows<1>(own, i, down.row);
    }

    template <int kCount>
    void project_rows(const GroupPart& own, std::int64_t first_token, std::int64_t row) const {
        constexpr int kRows = kSums / kRegs / kCount;
        const std::int64_t size = args_.num_columns, rank = own.part.rank;
        const Bf16* src[kCount];
        float* dst[kCount];
        for (int t = 0; t < kCount; ++t) {
            src[t] = args_.src + tokens(own.group)[first_token + t] * size;
            dst[t] = own.hidden + (first_token + t) * rank + row;
        }
        const Bf16* rows = own.part.down + row * size;
        std::int64_t left = std::min(kDownBlock, rank - row);
        const auto advance = [&](int count) {
            rows += count * size, left -= count;
            for (int t = 0; t < kCount; ++t) dst[t] += count;
        };
        for (; left >= kRows; advance(kRows)) project<kCount, kRows>(src, rows, size, dst);
        for (; left > 0; advance(1)) project<kCount, 1>(src, rows, size, dst);
    }

    void add_blocks(std::int64_t group, std::int64_t first, std::int64_t end) const {
        for (std::int64_t i = first_parts_[group]; i < first_parts_[group + 1]; ++i)
            add_rows_of(parts_[i], first, end);
    }

    // Adds what a part has for these rows of the outputs.
    void add_rows_of(const GroupPart& own, std::int64_t first, std::int64_t end) const {
        const std::int64_t low = std::max(first - own.part.first_row, std::int64_t(0));
        const std::int64_t high = std::min(end - own.part.first_row, own.part.num_rows);
        const std::int64_t count = low < high ? num_tokens(own.group) : 0;
        std::int64_t i = 0;
        for (; i + kTokens <= count; i += kTokens) add_to<kTokens>(own, i, low, high);
        for (; i < count; ++i) add_to<1>(own, i, low, high);
    }

    template <int kCount>
    void add_to(const GroupPart& own, std::int64_t first_token, std::int64_t low,
                std::int64_t high) const {
        const std::int64_t stride = own.part.num_rows, rank = own.part.rank;
        const float* hidden[kCount];
        Bf16* dst[kCount];
        for (int t = 0; t < kCount; ++t) {
            hidden[t] = own.hidden + (first_token + t) * rank;
            dst[t] = args_.dst + tokens(own.group)[first_token + t] * args_.num_rows +
                     own.part.first_row + low;
        }
        const Bf16* rows = own.part.up + low;
        std::int64_t left = high - low;
        const auto advance = [&](int count) {
            rows += count, left -= count;
            for (int t = 0; t < kCount; ++t) dst[t] += count;
        };
        for (; left >= kUpVectors * kLanes; advance(kUpVectors * kLanes))
            add_rows<kCount, kUpVectors>(rows, stride, rank, hidden, dst);
        for (; left >= kLanes; advance(kLanes))
            add_rows<kCount, 1>(rows, stride, rank, hidden, dst);
        for (int t = 0; left > 0 && t < kCount; ++t)
            add_last_rows(rows, stride, rank, hidden[t], dst[t], left);
    }

    const LowRankArgs& args_;
    const LowRankGroups& groups_;
    std::vector<GroupPart> parts_;
    std::vector<Down> downs_;
    std::vector<std::int64_t> first_parts_;  // of the groups
};

}  // namespace

extern "C" {

void baton_add_low_rank(const LowRankArgs* args) { LowRank(*args).run(); }

void baton_add_head_low_rank(const HeadLowRankArgs* args) {
    const LowRankGroups& groups = args->groups;
    NumberedGroups by_head;
    for (std::int64_t head = 0; head < args->num_heads; ++head)
        for (std::int64_t group = 0; group < groups.num_groups; ++group) {
            by_head.begin(groups.adapters[group], head);
            for (const std::int64_t token : tokens_of(groups, group))
                by_head.add(head * args->num_tokens + token);
        }
    const LowRankArgs all{
        .groups = by_head.groups(),
        .src = args->src,
        .dst = args->dst,
        .hidden_buf = args->hidden_buf,
        .place = 0,
        .num_columns = args->num_columns,
        .num_rows = args->num_rows,
        .num_threads = args->num_threads,
    };
    baton_add_low_rank(&all);
}

}  // extern "C"
