// Products of low-rank adapters with rows that have a matrix each: of an expert or of a head.
#pragma once

#include "abi.h"

#include <span>
#include <vector>

namespace baton {

inline std::span<const std::int64_t> tokens_of(const LowRankGroups& groups, std::int64_t group) {
    const std::int64_t first = groups.first_tokens[group];
    return {groups.tokens + first, std::size_t(groups.first_tokens[group + 1] - first)};
}

// Groups of rows with the same adapter and the same matrix.
class NumberedGroups {
  public:
    // Adds a group, with the place of the matrix `number` of an adapter.
    void begin(const LowRankAdapter& adapter, std::int64_t number) {
        const bool has_place = number < adapter.num_places;
        adapters_.push_back(has_place ? LowRankAdapter{adapter.places + number, 1}
                                      : LowRankAdapter{nullptr, 0});
        first_rows_.push_back(std::int64_t(rows_.size()));
    }
    // Adds a row to the last group.
    void add(std::int64_t row) {
        rows_.push_back(row);
        first_rows_.back() = std::int64_t(rows_.size());
    }

    LowRankGroups groups() const {
        return {adapters_.data(), first_rows_.data(), rows_.data(), std::int64_t(adapters_.size())};
    }

  private:
    std::vector<LowRankAdapter> adapters_;
    std::vector<std::int64_t> first_rows_{0}, rows_;
};

}  // namespace baton
