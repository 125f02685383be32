// Gate of an MLP: a function of the gate and up projections. Each rounds where torch does.
#pragma once

#include "vector_math.h"

#include <algorithm>

namespace baton {

// x * sigmoid(exponent)
inline F32x16 multiply_sigmoid(F32x16 x, F32x16 exponent) { return x / (1.0f + exp(-exponent)); }

// A NaN stays a NaN.
inline F32x16 clamp_above(F32x16 numbers, F32x16 limit) {
    return blend(less_mask(limit, numbers), limit, numbers);
}
inline F32x16 clamp_below(F32x16 numbers, F32x16 limit) {
    return blend(less_mask(numbers, limit), limit, numbers);
}

// Function of the gate projection.
template <GateKind KIND>
inline F32x16 activate(F32x16 gate, [[maybe_unused]] const GateParams& params) {
    if constexpr (KIND == GateKind::kSilu) {
        return round_to_bf16(multiply_sigmoid(gate, gate));
    } else if constexpr (KIND == GateKind::kGeluTanh) {
        // (1 + tanh(z)) / 2 = sigmoid(2z), with z = sqrt(2 / pi) * (x + 0.044715 * x^3)
        const F32x16 exponent = gate * (1.59576912f + 0.0713548163f * (gate * gate));
        return round_to_bf16(multiply_sigmoid(gate, exponent));
    } else if constexpr (KIND == GateKind::kSquaredRelu) {
        return clamp_below(gate, splat(0.0f));
    } else {
        gate = clamp_above(gate, splat(params.limit));
        const F32x16 sigmoid = multiply_sigmoid(splat(1.0f), round_to_bf16(gate * params.alpha));
        return round_to_bf16(gate * round_to_bf16(sigmoid));
    }
}

// Function of the up projection.
template <GateKind KIND>
inline F32x16 factor_of(F32x16 up, [[maybe_unused]] const GateParams& params) {
    if constexpr (KIND == GateKind::kSquaredRelu) return activate<KIND>(up, params);
    if constexpr (KIND != GateKind::kClampedSwiglu) return up;
    const F32x16 limit = splat(params.limit);
    return round_to_bf16(clamp_below(clamp_above(up, limit), -limit) + 1.0f);
}

// Loads up last: with few registers that is faster.
template <GateKind KIND>
inline F32x16 apply_gate(const Bf16* gate, const Bf16* up, const GateParams& params) {
    const F32x16 activated = activate<KIND>(bf16_to_f32(gate), params);
    return activated * factor_of<KIND>(bf16_to_f32(up), params);
}

template <GateKind KIND>
inline void gate_row(const Bf16* gate, const Bf16* up, Bf16* dst, std::int64_t size,
                     const GateParams& params) {
    std::int64_t at = 0;
    for (; at + kLanes <= size; at += kLanes)
        store(dst + at, apply_gate<KIND>(gate + at, up + at, params));
    if (at == size) return;
    Bf16 rest[3][kLanes] = {};
    std::copy(gate + at, gate + size, rest[0]);
    std::copy(up + at, up + size, rest[1]);
    store(rest[2], apply_gate<KIND>(rest[0], rest[1], params));
    std::copy_n(rest[2], size - at, dst + at);
}

// Numbers of a token's gate, before those of up.
inline std::int64_t gate_size(const GateParams& params, std::int64_t size) {
    return params.kind == GateKind::kSquaredRelu ? 0 : size;
}

// Computes `size` numbers of one token.
inline void gate_row(const Bf16* gate, const Bf16* up, Bf16* dst, std::int64_t size,
                     const GateParams& params) {
    constexpr void (*kGate[])(const Bf16*, const Bf16*, Bf16*, std::int64_t, const GateParams&) = {
        gate_row<GateKind::kSilu>,
        gate_row<GateKind::kGeluTanh>,
        gate_row<GateKind::kClampedSwiglu>,
        gate_row<GateKind::kSquaredRelu>,
    };
    kGate[int(params.kind)](gate, up, dst, size, params);
}

}  // namespace baton
