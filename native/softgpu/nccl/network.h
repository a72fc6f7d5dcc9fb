// The connections of one rank with those of other hosts.
//
// What a rank would see of another in shared memory is brought here by TCP: a thread writes it into a segment
// of this process alone, and rings this rank's bells. Each connection goes one way. A slot stays as it is
// until all have told that they need it no more, so it is sent from where it lies.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "softgpu/nccl/bootstrap.h"
#include "softgpu/nccl/news.h"
#include "softgpu/nccl/shared_segment.h"

namespace softgpu::nccl {

class Network {
 public:
  // `local` is what the ranks of this host share, `mirror` what the others fill.
  Network(int rank, SharedSegment& local, SharedSegment& mirror, std::vector<RemotePeer> peers);
  ~Network() { stop(); }

  // Never waits.
  void send(int rank, const News& news);

  // Nothing more will come from this rank: it has closed the connection or has died, or the system has given
  // it up. All that it sent before is there.
  bool has_ended(int rank) const { return peers_.at(rank)->ended; }
  std::string reason_of_end(int rank) const { return peers_.at(rank)->reason; }

  // Until all is on its way, so that the process may end. Asks `give_up` now and then.
  void flush(const std::function<bool()>& give_up, std::chrono::milliseconds interval);

  // Closes the connections, and drops what is not on its way.
  void stop();

 private:
  struct Peer {
    explicit Peer(RemotePeer&& remote) : remote(std::move(remote)) {}
    RemotePeer remote;
    // Under mutex_.
    std::deque<News> unsent;
    size_t sent_of_first = 0;  // bytes of it and of its slot
    bool takes_no_more = false;
    // The thread's.
    News incoming;
    size_t received = 0;  // bytes of it and of its slot
    std::string reason;   // written before `ended`
    std::atomic<bool> ended = false;
  };

  void run();
  void transmit(Peer& peer);
  void receive(Peer& peer);
  void publish(const Peer& peer);
  void end(Peer& peer, const std::string& reason);  // under mutex_
  std::byte* slot_of(const News& news, int from, int to);
  void wake();

  const int rank_;
  SharedSegment& local_;
  SharedSegment& mirror_;
  std::map<int, std::unique_ptr<Peer>> peers_;
  FileDescriptor wake_;
  std::mutex mutex_;
  std::condition_variable all_sent_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace softgpu::nccl
