// GEMM with packed weights of 4 or 8 bits.
//
// The activations of a token are quantized to 16-bit integers with one scale.

#include "gemm.h"
#include "thread_pool.h"

#if defined(__AMX_INT8__)
#include "gemm_quantized_amx.h"
#elif defined(__AVX2__) && !defined(__AVX512BF16__)
#include "gemm_quantized_avx2.h"
#else
#include "gemm_quantized_vectors.h"
#endif

namespace baton::quantized {

namespace {

using MultiplyPanel = void (*)(const Gemm&, QuantizedActivations&, std::int64_t);

template <NumberFormat FORMAT, ScaleType SCALE>
void multiply_any(const Gemm& p, QuantizedActivations& activations, std::int64_t panel) {
#if defined(__AMX_INT8__)
    if constexpr (bits_of(FORMAT) == 8) return multiply_many<FORMAT, SCALE>(p, activations, panel);
#endif
    multiply_panel<FORMAT, SCALE>(p, activations, panel);
}

MultiplyPanel multiply_of(const QuantizedLayout& layout) {
    return choose_by_format(layout, []<NumberFormat FORMAT, ScaleType SCALE>() -> MultiplyPanel {
        return multiply_any<FORMAT, SCALE>;
    });
}

}  // namespace

void linear(const GroupedLinear& args) {
    const QuantizedLayout layout(args.matrices[0]);
    thread_local QuantizedActivations buffer;
    // Captured by reference: all threads use the buffer of the calling thread.
    QuantizedActivations& quantized = buffer;
    quantized.resize(layout, args.num_rows());
    const auto quantize = [&](std::int64_t row, std::int64_t end) {
        for (; row < end; ++row) quantized.quantize(row, args.src + row * layout.num_columns);
    };
    parallel_for(args.num_rows(), layout.num_columns, args.num_threads, quantize);
    const MultiplyPanel multiply = multiply_of(layout);
    const std::int64_t panels = layout.num_panels();
    WorkQueue queue(args.num_matrices * panels, 1, args.num_threads);
    run_parallel(args.num_threads, [&](int i, int) {
        for (WorkQueue::Unit unit; queue.next(i, unit);) {
            const std::int64_t index = unit.index / panels, panel = unit.index % panels;
            const PackedMatrix& matrix = args.matrices[index];
            const Gemm gemm{layout,
                            static_cast<const std::uint8_t*>(matrix.packed),
                            matrix.bias,
                            args.dst,
                            args.row_offsets[index],
                            args.row_offsets[index + 1]};
            multiply(gemm, quantized, panel);
        }
    });
}

}  // namespace baton::quantized
