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

// What touches each number once is shared only where there are many.
inline int threads_for(std::int64_t numbers, int num_threads) {
    constexpr std::int64_t kWorthAThread = 16384;
    const std::int64_t most = numbers / kWorthAThread + 1;
    return most < num_threads ? int(most) : num_threads;
}

// The i-th of so many equal runs of whole units.
struct Share {
    std::int64_t first, end;
    Share(std::int64_t total, int i, int count) : first(total * i / count), end(total * (i + 1) / count) {}
};

}  // namespace baton
