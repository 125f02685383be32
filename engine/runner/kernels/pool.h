// A few threads that share one piece of work at a time with whoever asks.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace baton {

// Who waits looks for its work for a few microseconds, then sleeps: a core that spins is a core
// that the node beside us does not have.
class Pool {
  public:
    static Pool& of_process() {
        static Pool* pool = new Pool;  // never destroyed: its threads end with the process
        return *pool;
    }

    // Calls part(i, count) for each i below count, at the same time; returns when all are done.
    void run(int count, const std::function<void(int, int)>& part) {
        count = count < kMost ? count : kMost;
        if (count <= 1) return part(0, 1);
        std::lock_guard<std::mutex> one_at_a_time(turn_);
        while (int(threads_.size()) < count - 1) {
            const int index = int(threads_.size()) + 1;
            const std::uint32_t seen = round_.load();
            threads_.emplace_back([this, index, seen] { serve(index, seen); });
        }
        part_ = &part;
        left_.store(count - 1);
        round_.store((round_.load() / (kMost + 1) + 1) * (kMost + 1) + count);
        round_.notify_all();
        part(0, count);
        wait_while_not(left_, 0);
    }

  private:
    static constexpr int kLooks = 2000;
    static constexpr int kMost = 255;  // threads in one round

    // Who is not in a round may sleep through it, so what it needs to know of it is one number.
    void serve(int index, std::uint32_t seen) {
        for (;;) {
            for (int i = 0; i < kLooks && round_.load() == seen; ++i) pause();
            round_.wait(seen);
            seen = round_.load();
            const int count = seen % (kMost + 1);
            if (index >= count) continue;
            (*part_)(index, count);
            if (left_.fetch_sub(1) == 1) left_.notify_one();
        }
    }

    static void wait_while_not(std::atomic<int>& value, int wanted) {
        for (int i = 0; i < kLooks && value.load() != wanted; ++i) pause();
        for (int now = value.load(); now != wanted; now = value.load()) value.wait(now);
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    std::mutex turn_;
    std::vector<std::thread> threads_;
    std::atomic<std::uint32_t> round_{0};  // its number, times kMost + 1, and how many take part
    std::atomic<int> left_{0};
    const std::function<void(int, int)>* part_ = nullptr;
};

// The i-th of so many equal runs of whole units.
struct Share {
    std::int64_t first, end;
    Share(std::int64_t total, int i, int count) : first(total * i / count), end(total * (i + 1) / count) {}
};

// A run of units for each thread, gone through so many times. Who has none left takes the last of
// another's: a core that is busy with something else, too, would keep all others waiting.
class Shares {
  public:
    struct Unit {
        std::int64_t which, pass;
    };

    Shares(std::int64_t total, std::int64_t passes, int num_threads) : runs_(num_threads) {
        for (int i = 0; i < num_threads; ++i) {
            const Share share(total, i, num_threads);
            runs_[i].first = share.first, runs_[i].size = share.end - share.first;
            runs_[i].left = std::uint64_t(runs_[i].size * passes) << 32;
        }
    }

    // Whether there is another unit for this thread.
    bool take(int thread, Unit& unit) {
        const int count = int(runs_.size());
        if (runs_[thread].take(unit, true)) return true;
        for (int i = 1; i < count; ++i)
            if (runs_[(thread + i) % count].take(unit, false)) return true;
        return false;
    }

  private:
    struct alignas(64) Run {
        std::int64_t first, size;
        std::atomic<std::uint64_t> left;  // the first that is left, and where they end << 32

        bool take(Unit& unit, bool is_own) {
            std::uint64_t now = left.load(), at;
            do {
                const std::uint64_t begin = now & 0xffffffffu, end = now >> 32;
                if (begin == end) return false;
                at = is_own ? begin : end - 1;
            } while (!left.compare_exchange_weak(now, is_own ? now + 1 : now - (1ull << 32)));
            unit = {first + std::int64_t(at) % size, std::int64_t(at) / size};
            return true;
        }
    };

    std::vector<Run> runs_;
};

// Calls part(first, end) until each unit was in one of them, some of them at a time: as many as are
// worth a thread's while, where a unit has so many numbers and each is touched about once.
template <typename Part>
void share_out(std::int64_t total, std::int64_t numbers, int num_threads, Part part) {
    constexpr std::int64_t kWorthAThread = 16384;
    const std::int64_t some = numbers < kWorthAThread ? kWorthAThread / numbers : 1;
    const std::int64_t parts = (total + some - 1) / some;
    if (parts < num_threads) num_threads = int(parts);
    if (num_threads <= 1) return part(0, total);
    Shares shares(parts, 1, num_threads);
    Pool::of_process().run(num_threads, [&](int i, int) {
        for (Shares::Unit unit; shares.take(i, unit);) {
            const std::int64_t first = unit.which * some;
            part(first, first + some < total ? first + some : total);
        }
    });
}

}  // namespace baton
