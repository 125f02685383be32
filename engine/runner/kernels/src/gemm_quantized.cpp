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

template <ScaleType SCALE>
constexpr MultiplyPanel kMultiplyInt8 =
#if defined(__AMX_INT8__)
    multiply_bytes<SCALE>;
#else
    multiply_panel<NumberFormat::kInt8, SCALE>;
#endif

template <ScaleType SCALE>
constexpr MultiplyPanel kMultiplyInt4 = multiply_panel<NumberFormat::kInt4, SCALE>;

// By NumberFormat and ScaleType.
constexpr MultiplyPanel kMultiplyPanel[][3] = {
    {kMultiplyInt8<ScaleType::kFloat32>, kMultiplyInt8<ScaleType::kBfloat16>,
     kMultiplyInt8<ScaleType::kFloat16>},
    {kMultiplyInt4<ScaleType::kFloat32>, kMultiplyInt4<ScaleType::kBfloat16>,
     kMultiplyInt4<ScaleType::kFloat16>},
    {multiply_panel<NumberFormat::kMxfp4, ScaleType::kFloat32>},
    {multiply_panel<NumberFormat::kInt8Offsets, ScaleType::kFloat32>,
     multiply_panel<NumberFormat::kInt8Offsets, ScaleType::kBfloat16>,
     multiply_panel<NumberFormat::kInt8Offsets, ScaleType::kFloat16>},
    {multiply_panel<NumberFormat::kInt4Offsets, ScaleType::kFloat32>,
     multiply_panel<NumberFormat::kInt4Offsets, ScaleType::kBfloat16>,
     multiply_panel<NumberFormat::kInt4Offsets, ScaleType::kFloat16>},
};

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
    const std::int64_t panels = layout.num_panels();
    WorkQueue queue(args.num_matrices * panels, 1, args.num_threads);
    ThreadPool::instance().run(args.num_threads, [&](int i, int) {
        for (WorkQueue::Unit unit; queue.next(i, unit);) {
            const std::int64_t index = unit.index / panels, panel = unit.index % panels;
            const PackedMatrix& matrix = args.matrices[index];
            const Gemm gemm{layout,
                            static_cast<const std::uint8_t*>(matrix.packed),
                            matrix.bias,
                            args.dst,
                            args.row_offsets[index],
                            args.row_offsets[index + 1]};
            kMultiplyPanel[int(layout.format)][int(layout.scale_type)](gemm, quantized, panel);
        }
    });
}

}  // namespace baton::quantized
