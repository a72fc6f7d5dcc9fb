// Memory and events between processes. Each test forks a fresh process, before it uses the device, into a
// producer (the test's own process) and a consumer.
#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>

#include "softgpu/runtime/tests/support.h"

using Numbers = std::vector<int>;

namespace {

constexpr int passed = 42;
constexpr unsigned interprocess = cudaEventInterprocess | cudaEventDisableTiming;

// The other process: plain data to and from it, each received where it is waited for.
class Peer {
 public:
  Peer(int socket, pid_t process) : socket_(socket), process_(process) {}

  template <class T = char>
  void send(const T& value = {}) const {
    static_assert(std::is_trivially_copyable_v<T>);
    EXPECT_EQ(write(socket_, &value, sizeof value), static_cast<ssize_t>(sizeof value));
  }
  template <class T = char>
  T receive() const {
    T value{};
    EXPECT_EQ(recv(socket_, &value, sizeof value, MSG_WAITALL), static_cast<ssize_t>(sizeof value));
    return value;
  }
  void kill_it() const {
    EXPECT_EQ(kill(process_, SIGKILL), 0);
    EXPECT_EQ(waitpid(process_, nullptr, 0), process_);
  }

 private:
  int socket_;
  pid_t process_;
};

using Side = void (*)(const Peer&);

// Runs the producer here, the consumer in a child; ends with status 42 if nothing has failed in either.
[[noreturn]] void run(Side producer, Side consumer) {
  int sockets[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(sockets[0]);
    consumer(Peer(sockets[1], getppid()));
    std::_Exit(testing::Test::HasFailure() ? 1 : passed);
  }
  close(sockets[1]);
  producer(Peer(sockets[0], child));
  int status = 0;
  const bool ended = waitpid(child, &status, 0) == child;  // else the producer has killed it
  EXPECT_TRUE(!ended || (WIFEXITED(status) && WEXITSTATUS(status) == passed)) << "the consumer failed";
  std::_Exit(testing::Test::HasFailure() ? 1 : passed);
}

// The consumer here and the producer in a child, for a test in which the producer dies.
[[noreturn]] void run_reversed(Side producer, Side consumer) { run(consumer, producer); }

cudaIpcMemHandle_t handle_of(void* pointer) {
  cudaIpcMemHandle_t handle{};
  ok(cudaIpcGetMemHandle(&handle, pointer));
  return handle;
}

cudaError_t try_open(const cudaIpcMemHandle_t& handle, int** pointer) {
  return cudaIpcOpenMemHandle(reinterpret_cast<void**>(pointer), handle, cudaIpcMemLazyEnablePeerAccess);
}

int* open_memory(const cudaIpcMemHandle_t& handle) {
  int* pointer = nullptr;
  ok(try_open(handle, &pointer));
  return pointer;
}

Numbers read_memory(const int* from, std::size_t count) {
  Numbers values(count);
  ok(cudaMemcpy(values.data(), from, count * sizeof(int), cudaMemcpyDeviceToHost));
  return values;
}

void write_memory(int* to, const Numbers& values) {
  ok(cudaMemcpy(to, values.data(), values.size() * sizeof(int), cudaMemcpyHostToDevice));
}

void add_one(int* to, cudaStream_t stream = nullptr) {
  int one = 1;
  void* arguments[] = {&to, &one};
  ok(cudaLaunchKernel(&kernels::add, 1, 1, arguments, 0, stream));
}

bool readable_by_the_host(const void* pointer) {
  int ends[2];
  EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const bool readable = write(ends[1], pointer, 1) == 1;
  for (const int end : ends) close(end);
  return readable;
}

std::size_t used_bytes() {
  std::size_t free = 0, total = 0;
  ok(cudaMemGetInfo(&free, &total));
  return total - free;
}

// Memory.

void share_memory(const Peer& consumer) {
  DeviceInts memory(3);
  memory.write({1, 2, 3});
  consumer.send(handle_of(memory.get()));
  consumer.receive();
  EXPECT_EQ(memory.read(), (Numbers{2, 2, 3}));
  consumer.send();
  consumer.receive();
}

void use_shared_memory(const Peer& producer) {
  int* memory = open_memory(producer.receive<cudaIpcMemHandle_t>());
  EXPECT_EQ(read_memory(memory, 3), (Numbers{1, 2, 3}));
  add_one(memory);
  ok(cudaDeviceSynchronize());
  producer.send();
  producer.receive();
  EXPECT_FALSE(readable_by_the_host(memory));
  EXPECT_EQ(used_bytes(), 0u);  // it is the producer's
  cudaPointerAttributes attributes;
  ok(cudaPointerGetAttributes(&attributes, memory));
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 0);
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
  cudaIpcMemHandle_t handle;
  EXPECT_EQ(cudaIpcGetMemHandle(&handle, memory), cudaErrorInvalidValue);
  ok(cudaIpcCloseMemHandle(memory));
  EXPECT_EQ(cudaIpcCloseMemHandle(memory), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(memory, 0, 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  producer.send();
}

void share_parts(const Peer& consumer) {
  DeviceInts memory(3000), other(1);
  memory.write({5});
  const cudaIpcMemHandle_t handle = handle_of(memory.get()), of_its_inside = handle_of(memory.get() + 2000);
  EXPECT_EQ(std::memcmp(&handle, &of_its_inside, sizeof handle), 0);  // one allocation, one handle
  consumer.send(handle);
  consumer.send(handle_of(other.get()));
  consumer.receive();
}

void open_repeatedly(const Peer& producer) {
  const auto handle = producer.receive<cudaIpcMemHandle_t>(), other = producer.receive<cudaIpcMemHandle_t>();
  int* const memory = open_memory(handle);
  EXPECT_EQ(open_memory(handle), memory);
  EXPECT_NE(open_memory(other), memory);
  ok(cudaIpcCloseMemHandle(memory));
  EXPECT_EQ(read_memory(memory, 1), Numbers{5});  // open once more
  ok(cudaIpcCloseMemHandle(memory));
  EXPECT_EQ(cudaIpcCloseMemHandle(memory), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(read_memory(open_memory(handle), 1), Numbers{5});
  ok(cudaDeviceReset());  // closes the rest
  producer.send();
}

void free_shared_memory(const Peer& consumer) {
  int* first = nullptr;
  ok(cudaMalloc(reinterpret_cast<void**>(&first), sizeof(int)));
  write_memory(first, {7});
  consumer.send(handle_of(first));
  consumer.receive();
  ok(cudaFree(first));
  DeviceInts second(1);  // at the same address
  EXPECT_EQ(second.get(), first);
  second.write({8});
  consumer.send();
  consumer.receive();
  EXPECT_EQ(second.read(), Numbers{8});
}

void outlive_shared_memory(const Peer& producer) {
  const auto handle = producer.receive<cudaIpcMemHandle_t>();
  int* const memory = open_memory(handle);
  EXPECT_EQ(read_memory(memory, 1), Numbers{7});
  producer.send();
  producer.receive();
  EXPECT_EQ(read_memory(memory, 1), Numbers{0});
  write_memory(memory, {9});
  ok(cudaIpcCloseMemHandle(memory));
  int* again = nullptr;
  EXPECT_EQ(try_open(handle, &again), cudaErrorMapBufferObjectFailed);
  EXPECT_STREQ(cudaGetErrorString(cudaErrorMapBufferObjectFailed),
               "mapping of buffer object failed: what the handle stands for has been freed by the process "
               "that it comes from");
  EXPECT_EQ(cudaGetLastError(), cudaErrorMapBufferObjectFailed);
  producer.send();
}

void share_and_die(const Peer& consumer) {
  DeviceInts memory(1);
  memory.write({7});
  consumer.send(handle_of(memory.get()));
  consumer.receive();  // for ever
}

void outlive_the_producer(const Peer& producer) {
  const auto handle = producer.receive<cudaIpcMemHandle_t>();
  int* const memory = open_memory(handle);
  producer.kill_it();
  add_one(memory);
  EXPECT_EQ(read_memory(memory, 1), Numbers{8});
  ok(cudaIpcCloseMemHandle(memory));
  int* again = nullptr;
  EXPECT_EQ(try_open(handle, &again), cudaErrorMapBufferObjectFailed);
  EXPECT_NE(std::string(cudaGetErrorString(cudaErrorMapBufferObjectFailed)).find("has ended"),
            std::string::npos);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMapBufferObjectFailed);
}

void open_and_die(const Peer& producer) {
  add_one(open_memory(producer.receive<cudaIpcMemHandle_t>()));
  ok(cudaDeviceSynchronize());
  producer.send();
  producer.receive();  // for ever
}

void outlive_the_consumer(const Peer& consumer) {
  DeviceInts memory(1);
  memory.write({7});
  consumer.send(handle_of(memory.get()));
  consumer.receive();
  consumer.kill_it();
  EXPECT_EQ(memory.read(), Numbers{8});
}

void share_of_device_one(const Peer& consumer) {
  ok(cudaSetDevice(1));
  DeviceInts memory(1);
  memory.write({3});
  consumer.send(handle_of(memory.get()));
  consumer.receive();
}

void see_only_device_one(const Peer& producer) {
  setenv("CUDA_VISIBLE_DEVICES", "1", 1);
  EXPECT_EQ(read_memory(open_memory(producer.receive<cudaIpcMemHandle_t>()), 1), Numbers{3});
  producer.send();
}

void see_only_device_zero(const Peer& producer) {
  setenv("CUDA_VISIBLE_DEVICES", "0", 1);
  int* memory = nullptr;
  EXPECT_EQ(try_open(producer.receive<cudaIpcMemHandle_t>(), &memory), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
  producer.send();
}

// Events.

cudaIpcEventHandle_t handle_of(cudaEvent_t event) {
  cudaIpcEventHandle_t handle{};
  ok(cudaIpcGetEventHandle(&handle, event));
  return handle;
}

cudaEvent_t open_event(const cudaIpcEventHandle_t& handle) {
  cudaEvent_t event = nullptr;
  ok(cudaIpcOpenEventHandle(&event, handle));
  return event;
}

void share_an_event(const Peer& consumer) {
  OwnStream stream;
  OwnEvent event(interprocess);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  consumer.send(handle_of(event));
  consumer.receive();
  Gate gate(stream);
  ok(cudaEventRecord(event, stream));
  expect_not_ready(cudaEventQuery(event));
  consumer.send();
  consumer.receive();
  gate.open();
  ok(cudaEventSynchronize(event));
  consumer.receive();
}

void wait_for_a_shared_event(const Peer& producer) {
  const cudaEvent_t event = open_event(producer.receive<cudaIpcEventHandle_t>());
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);  // never recorded
  ok(cudaEventSynchronize(event));
  producer.send();
  producer.receive();
  expect_not_ready(cudaEventQuery(event));
  OwnStream waiting(cudaStreamNonBlocking), other(cudaStreamNonBlocking);
  Diary diary;
  ok(cudaStreamWaitEvent(waiting, event, 0));
  diary.note(waiting, 1);
  ok(cudaStreamSynchronize(other));
  expect_not_ready(cudaStreamQuery(waiting));
  producer.send();
  ok(cudaEventSynchronize(event));
  ok(cudaStreamSynchronize(waiting));
  EXPECT_EQ(diary.read(), Numbers{1});
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  float milliseconds = 0;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, event, event), cudaErrorInvalidResourceHandle);
  cudaIpcEventHandle_t handle;
  EXPECT_EQ(cudaIpcGetEventHandle(&handle, event), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  ok(cudaEventDestroy(event));
  producer.send();
}

void wait_for_the_consumer(const Peer& consumer) {
  OwnStream stream;
  OwnEvent event(interprocess);
  Diary diary;
  consumer.send(handle_of(event));
  consumer.receive();
  expect_not_ready(cudaEventQuery(event));
  ok(cudaStreamWaitEvent(stream, event, 0));
  diary.note(stream, 1);
  expect_not_ready(cudaStreamQuery(stream));
  // Anew, and already happened: a query is for this one, the wait still for the other.
  ok(cudaEventRecord(event, cudaStreamPerThread));
  ok(cudaEventSynchronize(event));
  expect_not_ready(cudaStreamQuery(stream));
  consumer.send();
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(diary.read(), Numbers{1});
  consumer.receive();
}

void record_for_the_producer(const Peer& producer) {
  OwnStream stream;
  const cudaEvent_t event = open_event(producer.receive<cudaIpcEventHandle_t>());
  Gate gate(stream);
  ok(cudaEventRecord(event, stream));
  producer.send();
  producer.receive();
  gate.open();
  ok(cudaStreamSynchronize(stream));  // before this process ends, and its work with it
  producer.send();
  ok(cudaEventDestroy(event));
}

void destroy_a_shared_event(const Peer& consumer) {
  OwnStream stream;
  cudaEvent_t event = nullptr;
  ok(cudaEventCreateWithFlags(&event, interprocess));
  Gate gate(stream);
  ok(cudaEventRecord(event, stream));
  const cudaIpcEventHandle_t handle = handle_of(event);
  consumer.send(handle);
  consumer.receive();
  ok(cudaEventDestroy(event));
  gate.open();
  ok(cudaStreamSynchronize(stream));
  consumer.send();
  consumer.receive();
}

void outlive_a_shared_event(const Peer& producer) {
  OwnStream stream;
  const auto handle = producer.receive<cudaIpcEventHandle_t>();
  const cudaEvent_t event = open_event(handle);
  ok(cudaStreamWaitEvent(stream, event, 0));
  producer.send();
  ok(cudaStreamSynchronize(stream));
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  producer.receive();
  cudaEvent_t again = nullptr;
  EXPECT_EQ(cudaIpcOpenEventHandle(&again, handle), cudaErrorMapBufferObjectFailed);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMapBufferObjectFailed);
  producer.send();
}

void record_and_die(const Peer& consumer) {
  OwnStream stream;
  OwnEvent event(interprocess);
  Gate gate(stream);
  ok(cudaEventRecord(event, stream));
  consumer.send(handle_of(event));
  consumer.receive();  // for ever
}

void hang_after_the_producer(const Peer& producer) {
  OwnStream stream(cudaStreamNonBlocking), other(cudaStreamNonBlocking);
  const cudaEvent_t event = open_event(producer.receive<cudaIpcEventHandle_t>());
  ok(cudaStreamWaitEvent(stream, event, 0));
  producer.kill_it();
  ok(cudaStreamSynchronize(other));
  expect_not_ready(cudaStreamQuery(stream));
  // Until the device fails, as with a hung collective.
  ok(cudaLaunchKernel(&kernels::fail, 1, 1, nullptr, 0, other));
  EXPECT_EQ(cudaEventSynchronize(event), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
}

}  // namespace

TEST(SharedMemory, IsReadAndWrittenByBothProcesses) {
  EXPECT_EXIT(run(share_memory, use_shared_memory), testing::ExitedWithCode(passed), "");
}

TEST(SharedMemory, IsOpenUntilClosedAsOftenAsOpened) {
  EXPECT_EXIT(run(share_parts, open_repeatedly), testing::ExitedWithCode(passed), "");
}

TEST(SharedMemory, OnceFreedIsNeverSomebodyElses) {
  EXPECT_EXIT(run(free_shared_memory, outlive_shared_memory), testing::ExitedWithCode(passed), "");
}

TEST(SharedMemory, OutlivesItsProducer) {
  EXPECT_EXIT(run_reversed(share_and_die, outlive_the_producer), testing::ExitedWithCode(passed), "");
}

TEST(SharedMemory, OutlivesItsConsumer) {
  EXPECT_EXIT(run(outlive_the_consumer, open_and_die), testing::ExitedWithCode(passed), "");
}

TEST(SharedMemory, StaysOnItsDevice) {
  EXPECT_EXIT(run(share_of_device_one, see_only_device_one), testing::ExitedWithCode(passed), "");
  EXPECT_EXIT(run(share_of_device_one, see_only_device_zero), testing::ExitedWithCode(passed), "");
}

TEST(SharedMemory, IsNotForThisProcessOrForNonsense) {
  DeviceInts memory(1);
  cudaIpcMemHandle_t handle = handle_of(memory.get());
  void* pointer = nullptr;
  EXPECT_EQ(cudaIpcOpenMemHandle(&pointer, handle, cudaIpcMemLazyEnablePeerAccess),
            cudaErrorDeviceUninitialized);
  EXPECT_EQ(cudaIpcOpenMemHandle(&pointer, handle, 0), cudaErrorInvalidValue);
  handle = {};
  EXPECT_EQ(cudaIpcOpenMemHandle(&pointer, handle, cudaIpcMemLazyEnablePeerAccess), cudaErrorInvalidValue);
  OwnEvent event(interprocess);
  const cudaIpcEventHandle_t of_event = handle_of(event);
  std::memcpy(&handle, &of_event, sizeof handle);
  EXPECT_EQ(cudaIpcOpenMemHandle(&pointer, handle, cudaIpcMemLazyEnablePeerAccess), cudaErrorInvalidValue);
  int on_host = 0;
  EXPECT_EQ(cudaIpcGetMemHandle(&handle, &on_host), cudaErrorInvalidValue);
  EXPECT_EQ(cudaIpcCloseMemHandle(&on_host), cudaErrorInvalidValue);
  EXPECT_EQ(cudaIpcCloseMemHandle(memory.get()), cudaErrorInvalidValue);  // to be freed
  ok(cudaFree(nullptr));
  void* freed = nullptr;
  ok(cudaMalloc(&freed, 1));
  ok(cudaFree(freed));
  EXPECT_EQ(cudaIpcGetMemHandle(&handle, freed), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(SharedMemory, HasNoNameAndIsForItsUserOnly) {
  DeviceInts memory(1);
  handle_of(memory.get());
  int found = 0;
  DIR* const files = opendir("/proc/self/fd");
  ASSERT_NE(files, nullptr);
  while (const dirent* file = readdir(files)) {
    char target[256] = "";
    struct stat status{};
    if (readlinkat(dirfd(files), file->d_name, target, sizeof target - 1) < 0 ||
        std::string(target).find("memfd:softgpu") == std::string::npos) {
      continue;
    }
    ASSERT_EQ(fstatat(dirfd(files), file->d_name, &status, 0), 0);
    EXPECT_EQ(status.st_mode & 0777u, 0600u);
    EXPECT_EQ(status.st_nlink, 0u);
    ++found;
  }
  closedir(files);
  EXPECT_EQ(found, 1);
}

TEST(SharedEvents, AreAwaitedByTheOtherProcess) {
  EXPECT_EXIT(run(share_an_event, wait_for_a_shared_event), testing::ExitedWithCode(passed), "");
}

TEST(SharedEvents, AreRecordedByEitherProcess) {
  EXPECT_EXIT(run(wait_for_the_consumer, record_for_the_producer), testing::ExitedWithCode(passed), "");
}

TEST(SharedEvents, LetOthersGoWhenTheyAreDestroyed) {
  EXPECT_EXIT(run(destroy_a_shared_event, outlive_a_shared_event), testing::ExitedWithCode(passed), "");
}

TEST(SharedEvents, OfAProcessThatDiedNeverHappen) {
  EXPECT_EXIT(run_reversed(record_and_die, hang_after_the_producer), testing::ExitedWithCode(passed), "");
}

TEST(SharedEvents, HaveABoundOfUnfinishedRecordings) {
  OwnStream stream;
  OwnEvent event(interprocess);
  Gate gate(stream);
  for (int i = 0; i < 509; ++i) ok(cudaEventRecord(event, stream));
  EXPECT_EQ(cudaEventRecord(event, stream), cudaErrorLaunchOutOfResources);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchOutOfResources);
  gate.open();
  ok(cudaStreamSynchronize(stream));
  ok(cudaEventRecord(event, stream));
  ok(cudaEventSynchronize(event));
}

TEST(SharedEvents, AreMadeForIt) {
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventInterprocess), cudaErrorInvalidValue);  // has no time
  OwnEvent ordinary, shared(interprocess);
  cudaIpcEventHandle_t handle{};
  EXPECT_EQ(cudaIpcGetEventHandle(&handle, ordinary), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaIpcOpenEventHandle(&event, handle), cudaErrorInvalidValue);
  EXPECT_EQ(cudaIpcOpenEventHandle(&event, handle_of(shared)), cudaErrorDeviceUninitialized);
  EXPECT_EQ(cudaGetLastError(), cudaErrorDeviceUninitialized);
}
