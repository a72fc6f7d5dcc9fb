// A stream: a queue of work with a thread of its own. Everything that waits for a stream (other streams,
// events, the host) waits for a Point of it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace softgpu {

class Device;
class Stream;

// Something to do on a stream's thread. run throws CudaFailure if it fails, which fails the device.
struct Work {
  virtual ~Work() = default;
  virtual void run() = 0;
  // False: there is more to do, and run has to be called again.
  virtual bool finished() const { return true; }
  // Whether it is code from outside softgpu (a kernel, a host function), which at exit must not outlive its
  // library.
  virtual bool foreign() const { return false; }
};

template <class Body>
std::unique_ptr<Work> make_work(Body body) {
  struct BodyWork final : Work {
    explicit BodyWork(Body work) : body(std::move(work)) {}
    void run() override { body(); }
    Body body;
  };
  return std::make_unique<BodyWork>(std::move(body));
}

// The place in a stream behind its item number `ticket` (counted from 1).
struct Point {
  std::shared_ptr<Stream> stream;
  std::uint64_t ticket = 0;

  bool reached() const;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(Device& device, unsigned flags, int priority, std::uint64_t id)
      : device(device), flags(flags), priority(priority), id(id) {}

  Device& device;
  const unsigned flags;
  const int priority;
  const std::uint64_t id;

  // Adds an item that starts when all of `after` is reached; only Device::enqueue calls it, which knows what
  // the item has to wait for. Null work is only a place to wait for. Returns the item's ticket.
  std::uint64_t append(std::unique_ptr<Work> work, std::vector<Point> after);

  // Blocks while more work waits here than a GPU's driver keeps.
  void await_room();

  Point tail();  // behind everything enqueued so far
  bool finished(std::uint64_t ticket) const { return finished_.load(std::memory_order_acquire) >= ticket; }

  // Blocks until the item is finished or its device has failed. Who waits when the process exits waits on
  // until its end: an error would send the thread into libraries that are being torn down.
  void wait(std::uint64_t ticket);

  // No more work will come: the thread ends after what is queued. Returns false if there is no thread to end.
  bool close();

  void notice_failure();  // of the device: who waits for this stream is let go

  bool runs_foreign_code() const { return foreign_; }

 private:
  struct Item {
    std::unique_ptr<Work> work;
    std::vector<Point> after;
  };

  void start_thread();
  void serve();
  void execute(Item& item);
  std::mutex mutex_;
  std::condition_variable work_came_, progressed_;
  std::deque<Item> queue_;
  std::uint64_t enqueued_ = 0;
  std::uint64_t nearest_awaited_ = UINT64_MAX;  // the lowest ticket that somebody waits for
  std::atomic<std::uint64_t> finished_{0};
  std::atomic<bool> foreign_{false};
  bool started_ = false, closed_ = false;
};

}  // namespace softgpu
