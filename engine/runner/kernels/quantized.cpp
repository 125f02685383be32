// Products with weights in whole numbers of four or eight bits, packed once.
//
// The states of a token become whole numbers of sixteen bits, held as two rows of bytes. So all
// sums within a group of columns are of whole numbers: exact, in whatever order they add up. The
// groups then add up in the order of the columns.

#include "calls.h"
#include "panels.h"
#include "pool.h"
#include "tiles.h"

#include <algorithm>
#include <vector>

using namespace baton;

namespace {

constexpr int kMostTokens = kMostRows / 2;  // each has a row of high bytes and one of low bytes
constexpr float kMostState = 32512;         // so that the high byte of what is rounded fits
typedef std::uint8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));

// How the numbers lie: by panel of rows, by group of columns. A group begins with its rows' scales
// and zeros, so that a thread reads one stream from begin to end.
struct Form {
    std::int64_t bits, num_rows, num_columns, group;

    std::int64_t num_groups() const { return (num_columns + group - 1) / group; }
    std::int64_t whole_group() const { return (group + 7) / 8 * 8; }
    std::int64_t whole_columns() const { return num_groups() * whole_group(); }
    std::int64_t num_panels() const { return (num_rows + kPanelRows - 1) / kPanelRows; }
    std::int64_t group_bytes() const { return kHead + whole_group() * kPanelRows * bits / 8; }
    std::int64_t bytes() const { return num_panels() * num_groups() * group_bytes(); }

    std::int64_t group_at(std::int64_t panel, std::int64_t which) const {
        return (panel * num_groups() + which) * group_bytes();
    }
    // Of a row's number, counted in columns of its group: four columns of a row lie side by side.
    std::int64_t byte_at(std::int64_t row, std::int64_t column) const {
        const std::int64_t quad = bits == 8 ? column / 4 : column / 8;
        return kHead + (quad * kPanelRows + row) * 4 + column % 4;
    }
    int shift(std::int64_t column) const { return bits == 4 && column % 8 >= 4 ? 4 : 0; }

    static constexpr std::int64_t kZeros = kPanelRows * sizeof(float), kHead = kZeros + kPanelRows;
};

struct Product {
    Form form;
    const std::uint8_t* packed;
    const Bf16* bias;  // or null
    Bf16* answer;      // [tokens, rows]
    std::int64_t num_tokens;
};

// The tokens as whole numbers. Kept from one product to the next, for its room.
class States {
  public:
    void fit(const Form& form, std::int64_t num_tokens) {
        form_ = form;
        stride_ = form.whole_columns();
        grow(bytes_, 2 * num_tokens * stride_);
        grow(sums_, 2 * num_tokens * form.num_groups());
        grow(scales_, num_tokens);
    }

    void take(std::int64_t token, const Bf16* states) {
        const float most = largest_of(states);
        // What is not finite makes the whole answer so.
        scales_[token] = most / kMostState;
        const bool is_something = most > 1e-30f && std::isfinite(most);
        const float factor = is_something ? kMostState / most : 0.0f;
        for (std::int64_t at = 0; at < stride_; at += kLanes) {
            const Floats numbers = is_something ? some(states, at) * factor : Floats{};
            const Whole whole = nearest(numbers);
            const Whole high = (whole + 128) >> 8;
            put(token, 0, at, high);
            put(token, 1, at, whole - high * 256);
        }
        for (int part = 0; part < 2; ++part) add_up(token, part);
    }

    std::int8_t* row(std::int64_t token, int part) {
        return bytes_.data() + (2 * token + part) * stride_;
    }
    const std::uint32_t* quads(std::int64_t token, int part) {
        return reinterpret_cast<const std::uint32_t*>(row(token, part));
    }
    std::int64_t stride() const { return stride_; }  // from one row to the next
    std::int32_t& sum(std::int64_t token, int part, std::int64_t group) {
        return sums_[(2 * token + part) * form_.num_groups() + group];
    }
    float scale(std::int64_t token) const { return scales_[token]; }

  private:
    template <typename Number>
    static void grow(std::vector<Number>& numbers, std::size_t size) {
        if (numbers.size() < size) numbers.resize(size);
    }

    float largest_of(const Bf16* states) const {
        // Without its sign a number's bits are in the order of its size, and NaN comes last.
        Bf16 most = 0;
        for (std::int64_t i = 0; i < form_.num_columns; ++i)
            most = std::max<Bf16>(most, states[i] & 0x7fff);
        return wide(most);
    }

    // Sixteen of them, zero where there are no more.
    Floats some(const Bf16* states, std::int64_t at) const {
        const std::int64_t left = form_.num_columns - at;
        if (left >= kLanes) return wide(states + at);
        Bf16 last[kLanes] = {};
        for (std::int64_t i = 0; i < left; ++i) last[i] = states[at + i];
        return wide(last);
    }

    void put(std::int64_t token, int part, std::int64_t at, Whole numbers) {
        typedef std::int8_t Narrow __attribute__((vector_size(kLanes)));
        const Narrow bytes = __builtin_convertvector(numbers, Narrow);
        std::memcpy(row(token, part) + at, &bytes, std::min<std::int64_t>(kLanes, stride_ - at));
    }

    void add_up(std::int64_t token, int part) {
        const std::int8_t* bytes = row(token, part);
        for (std::int64_t group = 0; group < form_.num_groups(); ++group) {
            std::int32_t total = 0;
            for (std::int64_t i = 0; i < form_.whole_group(); ++i)
                total += bytes[group * form_.whole_group() + i];
            sum(token, part, group) = total;
        }
    }

    Form form_;
    std::int64_t stride_;
    std::vector<std::int8_t> bytes_;
    std::vector<std::int32_t> sums_;
    std::vector<float> scales_;
};

template <int ROWS>
using Counts = Whole[ROWS][kVectors];

// counts += each row of bytes times the group's numbers.
template <int BITS, int ROWS>
inline void add_group(Counts<ROWS>& counts, const std::uint32_t* const (&rows)[ROWS],
                      const Words* numbers, std::int64_t first, std::int64_t end) {
    constexpr int kQuads = 8 / BITS;
    for (std::int64_t quad = first; quad < end; quad += kQuads, numbers += kVectors) {
        fetch_ahead(numbers, kVectors);
        for (int part = 0; part < kQuads; ++part) {
            Words weights[kVectors];
            for (int v = 0; v < kVectors; ++v)
                weights[v] = BITS == 8 ? numbers[v] : numbers[v] >> (4 * part) & 0x0f0f0f0fu;
            for (int row = 0; row < ROWS; ++row) {
                const std::uint32_t state = rows[row][quad + part];
                for (int v = 0; v < kVectors; ++v) add_bytes(counts[row][v], weights[v], state);
            }
        }
    }
}

// What the counts of a group stand for, of sixteen rows of a panel.
class Meaning {
  public:
    Meaning(const std::uint8_t* group, int v) {
        Bytes zero_bytes;
        std::memcpy(&scales_, group + v * sizeof scales_, sizeof scales_);
        std::memcpy(&zero_bytes, group + Form::kZeros + v * kLanes, sizeof zero_bytes);
        zeros_ = __builtin_convertvector(zero_bytes, Whole);
    }

    // high, low: counts of the two rows of bytes, whose own sums come behind them.
    Floats of(Whole high, Whole low, std::int32_t high_sum, std::int32_t low_sum) const {
        const Whole highs = high - zeros_ * high_sum, lows = low - zeros_ * low_sum;
        const Floats both = __builtin_convertvector(highs, Floats) * 256.0f +
                            __builtin_convertvector(lows, Floats);
        return both * scales_;
    }

  private:
    Floats scales_;
    Whole zeros_;
};

template <int BITS, int TOKENS>
void multiply(const Product& p, States& states, std::int64_t panel, std::int64_t first) {
    const Form& form = p.form;
    const std::uint32_t* rows[2 * TOKENS];
    for (int t = 0; t < TOKENS; ++t)
        for (int part = 0; part < 2; ++part) rows[2 * t + part] = states.quads(first + t, part);
    Totals<TOKENS> totals = {};
    const std::int64_t quads = form.whole_group() / 4;
    for (std::int64_t group = 0; group < form.num_groups(); ++group) {
        const std::uint8_t* at = p.packed + form.group_at(panel, group);
        Counts<2 * TOKENS> counts = {};
        add_group<BITS, 2 * TOKENS>(counts, rows, reinterpret_cast<const Words*>(at + Form::kHead),
                                    group * quads, (group + 1) * quads);
        for (int v = 0; v < kVectors; ++v) {
            const Meaning meaning(at, v);
            for (int t = 0; t < TOKENS; ++t)
                totals[t][v] += meaning.of(counts[2 * t][v], counts[2 * t + 1][v],
                                           states.sum(first + t, 0, group),
                                           states.sum(first + t, 1, group));
        }
    }
    for (int t = 0; t < TOKENS; ++t)
        for (int v = 0; v < kVectors; ++v) totals[t][v] *= states.scale(first + t);
    store_panel<TOKENS>(totals, p.bias, p.answer + first * p.form.num_rows, panel, form.num_rows);
}

template <int BITS>
void multiply_panel(const Product& p, States& states, std::int64_t panel) {
    constexpr void (*kMultiply[])(const Product&, States&, std::int64_t, std::int64_t) = {
        nullptr, multiply<BITS, 1>,
#if defined(__AVX512BF16__)
        multiply<BITS, 2>, multiply<BITS, 3>,
#endif
    };
    for (std::int64_t first = 0; first < p.num_tokens;) {
        const int count = next_run(p.num_tokens - first, kMostTokens);
        kMultiply[count](p, states, panel, first);
        first += count;
    }
}

#if defined(__AMX_INT8__)

constexpr int kTileTokens = kTileRows / 2;

// counts = so many rows of bytes times the group's numbers of eight bits: sixteen quads at once.
void count_tiles(Tiles& tiles, Whole (&counts)[kTileRows][kVectors], const std::int8_t* rows,
                 std::int64_t stride, int num_rows, const Words* numbers, std::int64_t quads) {
    constexpr std::int64_t kQuads = 16, kNext = sizeof(Words) * kVectors;
    tiles.have(num_rows, num_rows);
    settle();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    std::int64_t quad = 0;
    for (; quad + kQuads <= quads; quad += kQuads) {
        const Words* part = numbers + quad * kVectors;
        _tile_loadd(4, rows + 4 * quad, stride);
        _tile_loadd(6, part, kNext);
        _tile_dpbsud(0, 4, 6);
        fetch_ahead(part, kTileRows);
        _tile_loadd(7, part + 1, kNext);
        _tile_dpbsud(1, 4, 7);
        fetch_ahead(part + kTileRows, kTileRows);
        _tile_loadd(6, part + 2, kNext);
        _tile_dpbsud(2, 4, 6);
        fetch_ahead(part + 2 * kTileRows, kTileRows);
        _tile_loadd(7, part + 3, kNext);
        _tile_dpbsud(3, 4, 7);
        fetch_ahead(part + 3 * kTileRows, kTileRows);
    }
    _tile_stored(0, &counts[0][0], kNext);
    _tile_stored(1, &counts[0][1], kNext);
    _tile_stored(2, &counts[0][2], kNext);
    _tile_stored(3, &counts[0][3], kNext);
    for (int row = 0; quad < quads && row < num_rows; ++row) {
        const std::uint32_t* own[] = {reinterpret_cast<const std::uint32_t*>(rows + row * stride)};
        auto& count = reinterpret_cast<Counts<1>&>(counts[row]);
        add_group<8, 1>(count, own, numbers + quad * kVectors, quad, quads);
    }
}

void multiply_run(const Product& p, States& states, Tiles& tiles, std::int64_t panel,
                  std::int64_t first, int num_tokens) {
    const Form& form = p.form;
    const std::int64_t quads = form.whole_group() / 4;
    Floats totals[kTileTokens][kVectors] = {};
    for (std::int64_t group = 0; group < form.num_groups(); ++group) {
        const std::uint8_t* at = p.packed + form.group_at(panel, group);
        alignas(64) Whole counts[kTileRows][kVectors];
        count_tiles(tiles, counts, states.row(first, 0) + group * form.whole_group(),
                    states.stride(), 2 * num_tokens,
                    reinterpret_cast<const Words*>(at + Form::kHead), quads);
        for (int v = 0; v < kVectors; ++v) {
            const Meaning meaning(at, v);
            for (int t = 0; t < num_tokens; ++t)
                totals[t][v] += meaning.of(counts[2 * t][v], counts[2 * t + 1][v],
                                           states.sum(first + t, 0, group),
                                           states.sum(first + t, 1, group));
        }
    }
    for (int t = 0; t < num_tokens; ++t) {
        for (int v = 0; v < kVectors; ++v) totals[t][v] *= states.scale(first + t);
        store_row(totals[t], p.bias, p.answer + (first + t) * form.num_rows, panel, form.num_rows);
    }
}

// Few tokens are no work for tiles, and vectors read a little faster. Both count alike.
void multiply_bytes(const Product& p, States& states, std::int64_t panel) {
    if (p.num_tokens <= kMostTokens) return multiply_panel<8>(p, states, panel);
    Tiles tiles;
    for (std::int64_t first = 0, count; first < p.num_tokens; first += count) {
        count = std::min<std::int64_t>(p.num_tokens - first, kTileTokens);
        multiply_run(p, states, tiles, panel, first, int(count));
    }
}

#else

void multiply_bytes(const Product& p, States& states, std::int64_t panel) {
    multiply_panel<8>(p, states, panel);
}

#endif

}  // namespace

extern "C" {

// What `packed` must hold.
std::int64_t baton_quantized_bytes(std::int64_t bits, std::int64_t num_rows,
                                   std::int64_t num_columns, std::int64_t group) {
    return Form{bits, num_rows, num_columns, group}.bytes();
}

// numbers: [rows, columns], a byte each. scales, zeros: [rows, groups]. A group is all columns, or
// a multiple of eight. `packed` must be zero.
void baton_pack_quantized(const std::uint8_t* numbers, const float* scales,
                          const std::uint8_t* zeros, std::uint8_t* packed, std::int64_t bits,
                          std::int64_t num_rows, std::int64_t num_columns, std::int64_t group,
                          int num_threads) {
    const Form form{bits, num_rows, num_columns, group};
    Pool::of_process().run(num_threads, [=](int i, int count) {
        const Share share(num_rows, i, count);
        for (std::int64_t row = share.first; row < share.end; ++row) {
            const std::int64_t panel = row / kPanelRows, within = row % kPanelRows;
            for (std::int64_t which = 0; which < form.num_groups(); ++which) {
                std::uint8_t* at = packed + form.group_at(panel, which);
                const std::int64_t scale_at = row * form.num_groups() + which;
                std::memcpy(at + within * sizeof(float), scales + scale_at, sizeof(float));
                at[Form::kZeros + within] = zeros[scale_at];
                const std::int64_t first = which * group;
                const std::int64_t columns = std::min(group, num_columns - first);
                for (std::int64_t column = 0; column < columns; ++column)
                    at[form.byte_at(within, column)] |=
                        numbers[row * num_columns + first + column] << form.shift(column);
            }
        }
    });
}

// Some rows as the numbers they stand for.
void baton_unpack_quantized(const std::uint8_t* packed, const std::int64_t* rows,
                            std::int64_t count, Bf16* target, std::int64_t bits,
                            std::int64_t num_rows, std::int64_t num_columns, std::int64_t group) {
    const Form form{bits, num_rows, num_columns, group};
    const int mask = bits == 4 ? 15 : 255;
    for (std::int64_t i = 0; i < count; ++i)
        for (std::int64_t column = 0; column < num_columns; ++column) {
            const std::int64_t within = rows[i] % kPanelRows, inside = column % group;
            const std::uint8_t* at = packed + form.group_at(rows[i] / kPanelRows, column / group);
            float scale;
            std::memcpy(&scale, at + within * sizeof scale, sizeof scale);
            const int number = at[form.byte_at(within, inside)] >> form.shift(inside) & mask;
            target[i * num_columns + column] = narrow(float(number - at[Form::kZeros + within]) * scale);
        }
}

void baton_quantized_linear(const Bf16* states, const std::uint8_t* packed, const Bf16* bias,
                            Bf16* answer, std::int64_t num_tokens, std::int64_t bits,
                            std::int64_t num_rows, std::int64_t num_columns, std::int64_t group,
                            int num_threads) {
    const Product product{{bits, num_rows, num_columns, group}, packed, bias, answer, num_tokens};
    thread_local States room;
    States& whole = room;  // this thread's, for the others, too
    whole.fit(product.form, num_tokens);
    share_out(num_tokens, num_columns, num_threads, [&](std::int64_t token, std::int64_t end) {
        for (; token < end; ++token) whole.take(token, states + token * num_columns);
    });
    Shares shares(product.form.num_panels(), 1, num_threads);
    Pool::of_process().run(num_threads, [&](int i, int) {
        for (Shares::Unit unit; shares.take(i, unit);)
            bits == 4 ? multiply_panel<4>(product, whole, unit.which)
                      : multiply_bytes(product, whole, unit.which);
    });
}

}  // extern "C"
