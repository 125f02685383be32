// Mixture of experts: the rows of all tokens are grouped by expert, so that each expert's weights
// are read once.

#include "gate.h"
#include "gemm.h"
#include "low_rank.h"
#include "thread_pool.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

using namespace baton;

namespace {

// A row is a token of an expert. Rows are in ascending order of experts, then of tokens.
class Rows {
  public:
    explicit Rows(const MixArgs& args)
        : rows_(args.num_tokens * args.top_k), counts_(args.num_tokens) {
        std::vector<std::int64_t> ends(args.num_experts);
        const auto for_own_slots = [&](auto each) {
            for (std::size_t slot = 0; slot < rows_.size(); ++slot) {
                const std::int64_t expert = args.expert_ids[slot] - args.first_expert;
                if (expert >= 0 && expert < args.num_experts) each(slot, ends[expert]);
            }
        };
        for_own_slots([](std::int64_t, std::int64_t& count) { ++count; });
        offsets_.push_back(0);
        for (std::int64_t expert = 0; expert < args.num_experts; ++expert) {
            const std::int64_t count = ends[expert];
            ends[expert] = offsets_.back();
            if (count == 0) continue;
            gate_up_.push_back(args.gate_up[expert]);
            down_.push_back(args.down[expert]);
            offsets_.push_back(offsets_.back() + count);
        }
        slots_.resize(offsets_.back());
        for_own_slots([&](std::int64_t slot, std::int64_t& end) { slots_[end++] = slot; });
        for (std::size_t row = 0; row < slots_.size(); ++row) {
            const std::int64_t token = slots_[row] / args.top_k;
            rows_[token * args.top_k + counts_[token]++] = row;
        }
    }

    std::int64_t count() const { return slots_.size(); }
    // Index of the row in expert_ids and weights.
    std::int64_t slot(std::int64_t row) const { return slots_[row]; }
    // Rows of a token, in ascending order.
    std::span<const std::int64_t> of_token(std::int64_t token) const {
        return {rows_.data() + token * (rows_.size() / counts_.size()), counts_[token]};
    }

    GroupedLinear gate_up(const Bf16* src, Bf16* dst, std::int32_t num_threads) const {
        return grouped(gate_up_, src, dst, num_threads);
    }
    GroupedLinear down(const Bf16* src, Bf16* dst, std::int32_t num_threads) const {
        return grouped(down_, src, dst, num_threads);
    }

  private:
    GroupedLinear grouped(const std::vector<PackedMatrix>& matrices, const Bf16* src, Bf16* dst,
                          std::int32_t num_threads) const {
        return {
            .matrices = matrices.data(),
            .row_offsets = offsets_.data(),
            .num_matrices = std::int64_t(matrices.size()),
            .src = src,
            .dst = dst,
            .num_threads = num_threads,
        };
    }

    std::vector<std::int64_t> slots_, rows_, offsets_;
    std::vector<std::size_t> counts_;           // by token
    std::vector<PackedMatrix> gate_up_, down_;  // of the experts that have rows
};

// Rows of tokens with adapters, by expert and adapter. Calls begin(group, expert) for each group of
// rows, then add(row) for each of them.
template <typename Begin, typename Add>
void for_adapted_rows(const MixArgs& args, const Rows& rows, const Begin& begin, const Add& add) {
    const std::int64_t num_groups = args.groups.num_groups;
    std::vector<std::int64_t> group_of(args.num_tokens, -1);
    for (std::int64_t group = 0; group < num_groups; ++group)
        for (const std::int64_t token : tokens_of(args.groups, group)) group_of[token] = group;
    std::vector<std::pair<std::int64_t, std::int64_t>> found;  // expert and group; row
    for (std::int64_t row = 0; row < rows.count(); ++row) {
        const std::int64_t slot = rows.slot(row), group = group_of[slot / args.top_k];
        const std::int64_t expert = args.expert_ids[slot] - args.first_expert;
        if (group >= 0) found.emplace_back(expert * num_groups + group, row);
    }
    std::sort(found.begin(), found.end());
    for (std::size_t i = 0; i < found.size(); ++i) {
        const std::int64_t key = found[i].first;
        if (i == 0 || found[i - 1].first != key) begin(key % num_groups, key / num_groups);
        add(found[i].second);
    }
}

// Adds the products of adapters to the outputs of gate and up, or of down.
void add_low_rank(const MixArgs& args, const NumberedGroups& groups, const Bf16* src, Bf16* dst,
                  const PackedMatrix& matrix) {
    const LowRankArgs all{
        .groups = groups.groups(),
        .src = src,
        .dst = dst,
        .hidden_buf = args.hidden_buf,
        .place = 0,
        .num_columns = matrix.num_columns,
        .num_rows = matrix.num_rows,
        .num_threads = args.num_threads,
    };
    if (all.groups.num_groups > 0) baton_add_low_rank(&all);
}

void scale_row(const Bf16* src, float weight, Bf16* dst, std::int64_t size) {
    std::int64_t at = 0;
    for (; at + kLanes <= size; at += kLanes) store(dst + at, bf16_to_f32(src + at) * weight);
    for (; at < size; ++at) dst[at] = f32_to_bf16(bf16_to_f32(src[at]) * weight);
}

// Copies the inputs of all rows to narrow_buf.
void gather(const MixArgs& args, const Rows& rows, std::int64_t size) {
    parallel_for(rows.count(), size, args.num_threads, [&](std::int64_t row, std::int64_t end) {
        for (; row < end; ++row) {
            const std::int64_t slot = rows.slot(row);
            const Bf16* const src = args.src + slot / args.top_k * size;
            Bf16* const dst = args.narrow_buf + row * size;
            if (args.scales_input)
                scale_row(src, round_to_bf16(args.weights[slot]), dst, size);
            else
                std::memcpy(dst, src, size * sizeof(Bf16));
        }
    });
}

// Sums the rows of a token: in ascending order, in float32.
class TokenSum {
  public:
    TokenSum(const MixArgs& args, const Rows& rows, std::int64_t size)
        : args_(args), rows_(rows), size_(size), weights_(args.top_k), outputs_(args.top_k) {}

    void operator()(std::int64_t token) {
        const std::span<const std::int64_t> own = rows_.of_token(token);
        for (std::size_t i = 0; i < own.size(); ++i) {
            outputs_[i] = args_.narrow_buf + own[i] * size_;
            const float weight = args_.weights[rows_.slot(own[i])];
            weights_[i] = args_.scales_input ? 1.0f : round_to_bf16(weight);
        }
        Bf16* const dst = args_.dst + token * size_;
        std::int64_t at = 0;
        for (; at + kLanes <= size_; at += kLanes) {
            F32x16 total{};
            for (std::size_t i = 0; i < own.size(); ++i)
                total += bf16_to_f32(outputs_[i] + at) * weights_[i];
            store(dst + at, total);
        }
        for (; at < size_; ++at) {
            float total = 0;
            for (std::size_t i = 0; i < own.size(); ++i)
                total += bf16_to_f32(outputs_[i][at]) * weights_[i];
            dst[at] = f32_to_bf16(total);
        }
    }

  private:
    const MixArgs& args_;
    const Rows& rows_;
    std::int64_t size_;
    std::vector<float> weights_;
    std::vector<const Bf16*> outputs_;
};

}  // namespace

extern "C" {

void baton_mix_experts(const MixArgs* args) {
    if (args->num_tokens == 0) return;
    const std::int64_t hidden_size = args->down[0].num_rows, size = args->down[0].num_columns;
    const Rows rows(*args);
    if (rows.count() == 0) {
        std::fill_n(args->dst, args->num_tokens * hidden_size, Bf16{});
        return;
    }
    gather(*args, rows, hidden_size);
    linear(rows.gate_up(args->narrow_buf, args->wide_buf, args->num_threads));
    NumberedGroups gate_up, down;
    if (args->groups.num_groups > 0) {
        const auto begin = [&](std::int64_t group, std::int64_t expert) {
            gate_up.begin(args->groups.adapters[group], expert);
            down.begin(args->down_adapters[group], expert);
        };
        const auto add = [&](std::int64_t row) { gate_up.add(row), down.add(row); };
        for_adapted_rows(*args, rows, begin, add);
        add_low_rank(*args, gate_up, args->narrow_buf, args->wide_buf, args->gate_up[0]);
    }
    const std::int64_t up = gate_size(args->gate, size);
    parallel_for(rows.count(), size, args->num_threads, [&](std::int64_t row, std::int64_t end) {
        for (; row < end; ++row) {
            const Bf16* const gate = args->wide_buf + row * (up + size);
            gate_row(gate, gate + up, args->gated_buf + row * size, size, args->gate);
        }
    });
    linear(rows.down(args->gated_buf, args->narrow_buf, args->num_threads));
    add_low_rank(*args, down, args->gated_buf, args->narrow_buf, args->down[0]);
    const auto add_up = [&](std::int64_t token, std::int64_t end) {
        TokenSum add_rows(*args, rows, hidden_size);
        for (; token < end; ++token) add_rows(token);
    };
    parallel_for(args->num_tokens, args->top_k * hidden_size, args->num_threads, add_up);
}

}  // extern "C"
