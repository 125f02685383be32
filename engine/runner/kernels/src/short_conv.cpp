// Short convolutions. The bits of a token do not depend on the chunks of its sequence.

#include "recurrent.h"

using namespace baton;

namespace {

// One call of baton_short_conv. Sequences and runs are those of StateRuns.
class ShortConv : RecurrentPass<ShortConvArgs> {
  public:
    using RecurrentPass::RecurrentPass;

    void run() const {
        each(runs_.num_tokens, num_values_, [this](std::int64_t token) { multiply(token); });
        each(runs_.num_sequences, num_kept_ * num_channels_,
             [this](std::int64_t sequence) { load_inputs(sequence); });
        each(runs_.num_tokens, num_values_ * args_.conv_size,
             [this](std::int64_t token) { mix(token); });
        each(runs_.num_runs, num_kept_ * num_channels_,
             [this](std::int64_t run) { store_inputs(run); });
    }

  private:
    void multiply(std::int64_t token) const {
        Bf16* const factors = args_.projected + token * width_;
        const Bf16* const values = factors + num_values_;
        for (std::int64_t i = 0; i < num_values_; i += kLanes) {
            const std::int64_t left = num_values_ - i;
            store_some(factors + i, load_some(factors + i, left) * load_some(values + i, left),
                       left);
        }
    }

    void mix(std::int64_t token) const {
        float* const sums = args_.mixed_buf + token * num_values_;
        add_taps(token, 0, num_values_, sums);
        const Bf16* const gates = args_.gates + token * num_values_;
        Bf16* const dst = args_.dst + token * num_values_;
        for (std::int64_t i = 0; i < num_values_; i += kLanes) {
            const std::int64_t left = num_values_ - i;
            store_some(dst + i, load_some(gates + i, left) * load_some(sums + i, left), left);
        }
    }
};

}  // namespace

extern "C" {

void baton_short_conv(const ShortConvArgs* args) { ShortConv(*args).run(); }

}  // extern "C"
