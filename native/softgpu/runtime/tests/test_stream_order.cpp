// Random programs of launches, events and waits over all kinds of streams, checked against CUDA's rules as a
// model states them: whatever has to come first has come first.
#include <random>
#include <set>

#include "softgpu/runtime/tests/support.h"

namespace {

using Items = std::set<int>;  // numbers of items, and thereby all that comes before something

// What the next item of a stream comes after, by the rules alone.
class Model {
 public:
  Model(std::size_t streams, std::size_t events, std::size_t blocking_streams)
      : before_(streams), events_(events), blocking_(blocking_streams) {}

  // Stream 0 is the legacy stream; the next blocking_ ones are in order with it; the rest are not.
  Items add(std::size_t stream, int item) {
    order(stream);
    const Items first = before_[stream];
    before_[stream].insert(item);
    return first;
  }

  void record(std::size_t event, std::size_t stream) {
    order(stream);
    events_[event] = before_[stream];
  }

  void wait(std::size_t stream, std::size_t event) { join(before_[stream], events_[event]); }

 private:
  static void join(Items& items, const Items& more) { items.insert(more.begin(), more.end()); }

  void order(std::size_t stream) {
    if (stream == 0) {
      for (std::size_t other = 1; other <= blocking_; ++other) join(before_[0], before_[other]);
    } else if (stream <= blocking_) {
      join(before_[stream], before_[0]);
    }
  }

  std::vector<Items> before_, events_;
  std::size_t blocking_;
};

void run_program(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&random](std::size_t end) { return random() % end; };
  OwnStream first, second, third(cudaStreamNonBlocking), fourth(cudaStreamNonBlocking);
  const cudaStream_t streams[] = {nullptr, first, second, third, fourth};
  OwnEvent timed[2], untimed(cudaEventDisableTiming);
  const cudaEvent_t events[] = {timed[0], timed[1], untimed};
  Model model(5, 3, 2);
  Diary diary;
  std::vector<Items> comes_after;

  Gate gate;
  gate.close(streams[below(5)]);  // so that work piles up
  for (int step = 0; step < 200; ++step) {
    const std::size_t stream = below(5), event = below(3);
    switch (below(4)) {
      case 0:
        ok(cudaEventRecord(events[event], streams[stream]));
        model.record(event, stream);
        break;
      case 1:
        ok(cudaStreamWaitEvent(streams[stream], events[event], 0));
        model.wait(stream, event);
        break;
      default:
        diary.note(streams[stream], static_cast<int>(comes_after.size()));
        comes_after.push_back(model.add(stream, static_cast<int>(comes_after.size())));
    }
    if (step == 100) gate.open();
  }
  ok(cudaDeviceSynchronize());

  Items done;
  for (const int item : diary.read()) {
    for (const int earlier : comes_after[static_cast<std::size_t>(item)]) {
      EXPECT_TRUE(done.contains(earlier))
          << "item " << item << " ran before item " << earlier << ", seed " << seed;
    }
    done.insert(item);
  }
  EXPECT_EQ(done.size(), comes_after.size());
}

}  // namespace

TEST(StreamOrder, HoldsInRandomPrograms) {
  for (unsigned seed = 0; seed < 40; ++seed) run_program(seed);
}
