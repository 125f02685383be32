// ABI version and struct sizes, which the loader compares with its own.

#include "abi.h"

#include <cstring>
#include <type_traits>

using namespace baton;

namespace {

struct StructSize {
    const char* name;
    std::int64_t size;
};

template <typename Args>
constexpr StructSize entry(const char* name) {
    static_assert(std::is_standard_layout_v<Args> && std::is_trivially_copyable_v<Args>);
    return {name, sizeof(Args)};
}

constexpr StructSize kStructSizes[] = {
    entry<PagedKv>("PagedKv"),
    entry<BatchLayout>("BatchLayout"),
    entry<PackedMatrix>("PackedMatrix"),
    entry<PackArgs>("PackArgs"),
    entry<LinearArgs>("LinearArgs"),
    entry<HeadLinearArgs>("HeadLinearArgs"),
    entry<NormParams>("NormParams"),
    entry<RmsNormArgs>("RmsNormArgs"),
    entry<RopeAngles>("RopeAngles"),
    entry<RopeArgs>("RopeArgs"),
    entry<GateParams>("GateParams"),
    entry<GateArgs>("GateArgs"),
    entry<ArgmaxArgs>("ArgmaxArgs"),
    entry<WriteKvArgs>("WriteKvArgs"),
    entry<AttentionParams>("AttentionParams"),
    entry<AttentionArgs>("AttentionArgs"),
    entry<LayerArgs>("LayerArgs"),
    entry<PassArgs>("PassArgs"),
    entry<RouteArgs>("RouteArgs"),
    entry<MixArgs>("MixArgs"),
    entry<StateRows>("StateRows"),
    entry<StateRuns>("StateRuns"),
    entry<DeltaArgs>("DeltaArgs"),
    entry<MambaArgs>("MambaArgs"),
    entry<SigmoidArgs>("SigmoidArgs"),
    entry<CopyArgs>("CopyArgs"),
};

}  // namespace

extern "C" {

std::int32_t baton_abi_version() { return kAbiVersion; }

std::int64_t baton_struct_size(const char* name) {
    for (const StructSize& known : kStructSizes)
        if (std::strcmp(known.name, name) == 0) return known.size;
    return 0;
}

}  // extern "C"
