#include "softgpu/runtime/fault_control.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "softgpu/runtime/blocked_signals.h"
#include "softgpu/runtime/error.h"
#include "softgpu/runtime/fault_registry.h"

namespace softgpu {
namespace {

constexpr std::size_t longest_line = 4096;
constexpr timeval patience{.tv_sec = 5, .tv_usec = 0};  // with a client that says nothing, or does not listen

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_;
};

// The folder stays open: the socket is made and removed in it whatever its path has become. For the process's
// life.
int folder = -1;

[[noreturn]] void refuse(const std::string& path, const std::string& problem) {
  throw CudaFailure{cudaErrorNoDevice, "SOFTGPU_CONTROL names " + path + ", and " + problem};
}

std::string system_says(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

int open_folder(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) refuse(path, system_says("it can't be made"));
  const int opened = open(path.c_str(), O_DIRECTORY | O_NOFOLLOW | O_RDONLY | O_CLOEXEC);
  if (opened < 0) refuse(path, system_says("that is no folder that can be opened"));
  struct stat status{};
  if (fstat(opened, &status) != 0 || status.st_uid != geteuid() || (status.st_mode & 077) != 0) {
    close(opened);
    refuse(path, "others than its owner, who must be you, can use it; make it yours alone: chmod 700");
  }
  return opened;
}

std::string name_of_this_process() { return std::to_string(getpid()); }

Descriptor listen_in(const std::string& path) {
  Descriptor listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // By way of the open folder, as there is room for 107 bytes only.
  std::snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/%s", folder,
                name_of_this_process().c_str());
  unlinkat(folder, name_of_this_process().c_str(),
           0);  // of a process before us that had our number and was killed
  // The mode of the socket becomes that of its name.
  if (!listener || fchmod(listener.get(), 0600) != 0 ||
      bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    refuse(path, system_says("no socket can be opened in it"));
  }
  return listener;
}

bool is_ours(const Descriptor& client) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(client.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

// What comes before the first line feed, or before the end. Throws FaultSyntax.
std::string read_line(const Descriptor& client) {
  std::string line;
  while (line.find('\n') == std::string::npos) {
    char bytes[512];
    const ssize_t count = recv(client.get(), bytes, sizeof bytes, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw FaultSyntax("the line did not come in time");
    if (count == 0) break;
    line.append(bytes, static_cast<std::size_t>(count));
    if (line.size() > longest_line) throw FaultSyntax("the line is longer than 4096 bytes");
  }
  return line.substr(0, line.find('\n'));
}

std::string answer_to(const Descriptor& client) {
  try {
    if (!is_ours(client)) return "error: only the user of this process may order faults.\n";
    return "ok: " + arm_fault(read_line(client)) + ".\n";
  } catch (const FaultElsewhere& wrong) {
    return std::string("elsewhere: ") + wrong.what() + ".\n";
  } catch (const FaultSyntax& wrong) {
    return std::string("error: ") + wrong.what() + ".\n";
  }
}

void serve(const Descriptor& listener) {
  for (;;) {
    const Descriptor client(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!client) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      std::fprintf(stderr, "softgpu: the control socket takes no more faults (accept: %s)\n",
                   std::strerror(errno));
      return;
    }
    for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
      setsockopt(client.get(), SOL_SOCKET, option, &patience, sizeof patience);
    }
    const std::string answer = answer_to(client);
    // A client that has gone does not get it.
    send(client.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
  }
}

}  // namespace

void open_fault_control() {
  const char* path = std::getenv("SOFTGPU_CONTROL");
  if (!path || !*path) return;
  folder = open_folder(path);
  const BlockedSignals blocked;
  std::thread([listener = listen_in(path)] {
    pthread_setname_np(pthread_self(), "softgpu-faults");
    serve(listener);
  }).detach();
}

void close_fault_control() {
  if (folder >= 0) unlinkat(folder, name_of_this_process().c_str(), 0);
}

}  // namespace softgpu
