// Copies of KV blocks with their digests, in one pass over the bytes.
//
// The digest is XXH3 with 128 bits and the default secret, by Yann Collet (BSD-2-Clause), in the
// form for more than 240 bytes. Stores go past the caches: blocks are larger than them, and nothing
// reads the copy soon.

#include "abi.h"

#include <bit>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

using namespace baton;

namespace {

static_assert(std::endian::native == std::endian::little);

using Byte = unsigned char;

constexpr std::int64_t kStripeBytes = 64;
constexpr std::int64_t kSecretBytes = 192;
constexpr std::int64_t kStripesPerChunk = (kSecretBytes - kStripeBytes) / 8;
constexpr std::int64_t kChunkBytes = kStripesPerChunk * kStripeBytes;
constexpr std::int64_t kPrefetchBytes = 2 * kChunkBytes;
constexpr int kLanes = 8;

constexpr std::uint64_t kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                      0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5};
constexpr std::uint64_t kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr std::uint64_t kAvalanchePrime = 0x165667919E3779F9;

alignas(64) constexpr Byte kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

std::uint64_t read_word(const Byte* at) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

// Adds a stripe to the lanes. Compilers turn the loops into vector instructions.
inline void accumulate(std::uint64_t* lanes, const Byte* stripe, const Byte* secret) {
    std::uint64_t words[kLanes], keyed[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        words[i] = read_word(stripe + 8 * i);
        keyed[i] = words[i] ^ read_word(secret + 8 * i);
    }
    for (int i = 0; i < kLanes; ++i)
        lanes[i] += words[i ^ 1] + (keyed[i] & 0xffffffff) * (keyed[i] >> 32);
}

inline void scramble(std::uint64_t* lanes) {
    const Byte* const secret = kSecret + kSecretBytes - kStripeBytes;
    for (int i = 0; i < kLanes; ++i)
        lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ read_word(secret + 8 * i)) * kPrime32[0];
}

std::uint64_t fold_product(std::uint64_t one, std::uint64_t other) {
    const auto product = static_cast<unsigned __int128>(one) * other;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint64_t merge(const std::uint64_t* lanes, const Byte* secret, std::uint64_t start) {
    std::uint64_t hash = start;
    for (int i = 0; i < kLanes; i += 2)
        hash += fold_product(lanes[i] ^ read_word(secret + 8 * i),
                             lanes[i + 1] ^ read_word(secret + 8 * i + 8));
    hash = (hash ^ (hash >> 37)) * kAvalanchePrime;
    return hash ^ (hash >> 32);
}

void write_big_endian(Byte* dst, std::uint64_t word) {
    for (int i = 0; i < 8; ++i) dst[i] = static_cast<Byte>(word >> (56 - 8 * i));
}

// `dst` is aligned to 64 bytes, or the processor has no such stores.
inline void store_stripe(Byte* dst, const Byte* src) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
#elif defined(__SSE2__)
    for (int i = 0; i < 4; ++i)
        _mm_stream_si128(reinterpret_cast<__m128i*>(dst) + i,
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(src) + i));
#else
    std::memcpy(dst, src, kStripeBytes);
#endif
}

template <bool kIsAligned>
void copy_block(const Byte* src, Byte* dst, std::int64_t num_bytes, Byte* digest) {
    std::uint64_t lanes[kLanes] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                                   kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
    const Byte* const last_stripe = src + num_bytes - kStripeBytes;
    const std::int64_t num_chunks = (num_bytes - 1) / kChunkBytes;
    for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        for (std::int64_t i = 0; i < kStripesPerChunk; ++i, src += kStripeBytes) {
            __builtin_prefetch(src + kPrefetchBytes);
            accumulate(lanes, src, kSecret + 8 * i);
            if constexpr (kIsAligned)
                store_stripe(dst, src);
            else
                std::memcpy(dst, src, kStripeBytes);
            dst += kStripeBytes;
        }
        scramble(lanes);
    }
    const std::int64_t rest = num_bytes - num_chunks * kChunkBytes;
    std::memcpy(dst, src, static_cast<std::size_t>(rest));
    for (std::int64_t i = 0; i < (rest - 1) / kStripeBytes; ++i)
        accumulate(lanes, src + i * kStripeBytes, kSecret + 8 * i);
    accumulate(lanes, last_stripe, kSecret + kSecretBytes - kStripeBytes - 7);
    const auto length = static_cast<std::uint64_t>(num_bytes);
    const Byte* const high_secret = kSecret + kSecretBytes - kStripeBytes - 11;
    write_big_endian(digest, merge(lanes, high_secret, ~(length * kPrime64[1])));
    write_big_endian(digest + 8, merge(lanes, kSecret + 11, length * kPrime64[0]));
}

}  // namespace

extern "C" void baton_copy_blocks(const CopyArgs* args) {
    for (std::int64_t i = 0; i < args->num_blocks; ++i) {
        const auto* const src = reinterpret_cast<const Byte*>(args->src_addresses[i]);
        auto* const dst = reinterpret_cast<Byte*>(args->dst_addresses[i]);
        const bool is_aligned = args->dst_addresses[i] % kStripeBytes == 0;
        const auto copy = is_aligned ? copy_block<true> : copy_block<false>;
        copy(src, dst, args->block_bytes, args->digests + i * kDigestBytes);
    }
#if defined(__SSE2__)
    _mm_sfence();  // the copies are visible to other threads before what follows
#endif
}
