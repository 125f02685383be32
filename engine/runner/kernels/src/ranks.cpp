// Collective operations of processes that share memory.
//
// Each rank has two buffers, which take turns. A step of a call fills one, announces it and waits
// for the announcements of all others. A rank that announces a step has read all of the step
// before: so the buffer of that step can be filled again.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

#include "abi.h"
#include "simd.h"
#include "thread_pool.h"

using namespace baton;

namespace {

constexpr std::int64_t kLine = 64, kNumBuffers = 2, kVector = 16;
constexpr int kMaxSpins = 4000, kNapMs = 50;

// What one rank writes, and the others read.
struct alignas(kLine) Announced {
    std::atomic<std::uint32_t> step;
    std::atomic<std::uint32_t> sleepers;  // that wait for the next step
    std::atomic<std::uint32_t> has_ended;
    std::atomic<std::uint32_t> beats;  // naps of this rank, while it waits for another one
};

using Clock = std::chrono::steady_clock;

// Adds the time of a call.
class Timer {
  public:
    explicit Timer(RankLinks& links) : links_(links), began_(Clock::now()) {}
    ~Timer() { links_.spent_ns += std::chrono::nanoseconds(Clock::now() - began_).count(); }

  private:
    RankLinks& links_;
    const Clock::time_point began_;
};

Announced& announced(const RankLinks& links, std::int64_t rank) {
    return static_cast<Announced*>(links.shared)[rank];
}

char* buffer(const RankLinks& links, std::int64_t rank) {
    char* const buffers = static_cast<char*>(links.shared) + links.size * sizeof(Announced);
    const std::int64_t place = links.calls % kNumBuffers;
    return buffers + (rank * kNumBuffers + place) * links.buffer_bytes;
}

void nap(std::atomic<std::uint32_t>& word, std::uint32_t seen) {
#if defined(__linux__)
    const timespec limit{0, kNapMs * 1'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    std::this_thread::yield();
#endif
}

void wake(std::atomic<std::uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#endif
}

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Waits for the step of one rank. Returns false if the rank has ended, or does not come in time.
bool wait_for(const RankLinks& links, std::int64_t rank, std::uint32_t step) {
    Announced& other = announced(links, rank);
    const auto has_come = [&] { return std::int32_t(other.step.load() - step) >= 0; };
    for (int i = 0; i < kMaxSpins; ++i, pause())
        if (has_come()) return true;
    // Of a nap that takes longer, this process was stopped, as the other may have been.
    constexpr std::chrono::nanoseconds most = std::chrono::milliseconds(2 * kNapMs);
    std::chrono::nanoseconds waited{0};
    for (;;) {
        const auto began = Clock::now();
        announced(links, links.rank).beats.fetch_add(1);
        other.sleepers.fetch_add(1);
        const std::uint32_t seen = other.step.load();
        if (!has_come()) nap(other.step, seen);
        other.sleepers.fetch_sub(1);
        if (has_come()) return true;
        if (other.has_ended.load()) return false;
        waited += std::min<std::chrono::nanoseconds>(Clock::now() - began, most);
        if (links.patience_ms >= 0 && waited > std::chrono::milliseconds(links.patience_ms))
            return false;
    }
}

// Announces that this rank's buffer is filled, and waits for those of all others.
bool meet(RankLinks& links) {
    const std::uint32_t step = std::uint32_t(links.calls + 1);
    Announced& own = announced(links, links.rank);
    own.step.store(step);
    if (own.sleepers.load() > 0) wake(own.step);
    for (std::int64_t rank = 0; rank < links.size; ++rank) {
        if (rank == links.rank || wait_for(links, rank, step)) continue;
        links.missing = rank + 1;
        return false;
    }
    return true;
}

void add_up(const RankLinks& links, Bf16* dst, std::int64_t first, std::int64_t end) {
    const auto part = [&](std::int64_t rank) {
        return reinterpret_cast<const Bf16*>(buffer(links, rank));
    };
    std::int64_t i = first;
    for (; i + kVector <= end; i += kVector) {
        F32x16 sum = bf16_to_f32(part(0) + i);
        for (std::int64_t rank = 1; rank < links.size; ++rank) sum += bf16_to_f32(part(rank) + i);
        store(dst + i, sum);
    }
    for (; i < end; ++i) {
        float sum = bf16_to_f32(part(0)[i]);
        for (std::int64_t rank = 1; rank < links.size; ++rank) sum += bf16_to_f32(part(rank)[i]);
        dst[i] = f32_to_bf16(sum);
    }
}

void add_up(const RankLinks& links, float* dst, std::int64_t first, std::int64_t end) {
    for (std::int64_t i = first; i < end; ++i) {
        float sum = 0;
        for (std::int64_t rank = 0; rank < links.size; ++rank)
            sum += reinterpret_cast<const float*>(buffer(links, rank))[i];
        dst[i] = sum;
    }
}

template <typename Number>
void all_reduce(RankLinks& links, Number* numbers, std::int64_t count, int num_threads) {
    const std::int64_t most = links.buffer_bytes / sizeof(Number);
    for (std::int64_t at = 0; at < count; at += most) {
        const std::int64_t size = std::min(most, count - at);
        const auto fill = [&](std::int64_t first, std::int64_t end) {
            Number* const own = reinterpret_cast<Number*>(buffer(links, links.rank));
            std::copy(numbers + at + first, numbers + at + end, own + first);
        };
        const auto add = [&](std::int64_t first, std::int64_t end) {
            add_up(links, numbers + at, first, end);
        };
        parallel_for(size, 1, num_threads, fill);
        if (!meet(links)) return;
        parallel_for(size, 1, num_threads, add);
        ++links.calls;
    }
}

}  // namespace

extern "C" {

std::int64_t baton_rank_bytes(std::int64_t size, std::int64_t buffer_bytes) {
    return size * (std::int64_t(sizeof(Announced)) + kNumBuffers * buffer_bytes);
}

std::int64_t baton_all_reduce(RankLinks* links, void* numbers, std::int64_t count,
                              std::int32_t is_float32, std::int32_t num_threads) {
    if (links->missing) return links->missing;
    const Timer timer(*links);
    if (is_float32)
        all_reduce(*links, static_cast<float*>(numbers), count, num_threads);
    else
        all_reduce(*links, static_cast<Bf16*>(numbers), count, num_threads);
    return links->missing;
}

std::int64_t baton_all_gather(RankLinks* links, const void* src, void* dst,
                              std::int64_t num_bytes) {
    const Timer timer(*links);
    const char* const own = static_cast<const char*>(src);
    for (std::int64_t at = 0; at < num_bytes && !links->missing; at += links->buffer_bytes) {
        const std::int64_t size = std::min(links->buffer_bytes, num_bytes - at);
        std::memcpy(buffer(*links, links->rank), own + at, size);
        if (!meet(*links)) break;
        for (std::int64_t rank = 0; dst != nullptr && rank < links->size; ++rank)
            std::memcpy(static_cast<char*>(dst) + rank * num_bytes + at, buffer(*links, rank),
                        size);
        ++links->calls;
    }
    return links->missing;
}

std::int64_t baton_broadcast(RankLinks* links, void* bytes, std::int64_t num_bytes) {
    const Timer timer(*links);
    char* const own = static_cast<char*>(bytes);
    for (std::int64_t at = 0; at < num_bytes && !links->missing; at += links->buffer_bytes) {
        const std::int64_t size = std::min(links->buffer_bytes, num_bytes - at);
        if (links->rank == 0) std::memcpy(buffer(*links, 0), own + at, size);
        if (!meet(*links)) break;
        if (links->rank != 0) std::memcpy(own + at, buffer(*links, 0), size);
        ++links->calls;
    }
    return links->missing;
}

void baton_end_rank(void* shared, std::int64_t rank) {
    Announced& ended = static_cast<Announced*>(shared)[rank];
    ended.has_ended.store(1);
    wake(ended.step);
}

std::int64_t baton_rank_has_ended(const void* shared, std::int64_t rank) {
    return static_cast<const Announced*>(shared)[rank].has_ended.load();
}

std::int64_t baton_rank_beats(const void* shared, std::int64_t rank) {
    return static_cast<const Announced*>(shared)[rank].beats.load();
}

}  // extern "C"
