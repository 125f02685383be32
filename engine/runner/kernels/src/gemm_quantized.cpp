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
constexpr MultiplyPanel kMultiplyAny =
#if defined(__AMX_INT8__)
    multiply_many<FORMAT, SCALE>;
#else
    multiply_panel<FORMAT, SCALE>;
#endif

// By ScaleType.
template <NumberFormat FORMAT>
constexpr MultiplyPanel kMultiplyFormat[] = {kMultiplyAny<FORMAT, ScaleType::kFloat32>,
                                             kMultiplyAny<FORMAT, ScaleType::kBfloat16>,
                                             kMultiplyAny<FORMAT, ScaleType::kFloat16>};

MultiplyPanel multiply_of(const QuantizedLayout& layout) {
    const int scale = int(layout.scale_type);
    switch (layout.format) {
        case NumberFormat::kInt8:
            return kMultiplyFormat<NumberFormat::kInt8>[scale];
        case NumberFormat::kInt8Offsets:
            return kMultiplyFormat<NumberFormat::kInt8Offsets>[scale];
#if !defined(__AMX_BF16__)  // which dequantizes weights of 4 bits
        case NumberFormat::kInt4:
            return kMultiplyFormat<NumberFormat::kInt4>[scale];
        case NumberFormat::kInt4Offsets:
            return kMultiplyFormat<NumberFormat::kInt4Offsets>[scale];
        case NumberFormat::kMxfp4:
            return kMultiplyAny<NumberFormat::kMxfp4, ScaleType::kFloat32>;
#endif
        default:
            return nullptr;
    }
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
            multiply(gemm, quantized, panel);
        }
    });
}

}  // namespace baton::quantized
