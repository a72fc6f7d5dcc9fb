// jitckpt-proxy-server CLIENT_PROCESS: started by libjitckpt_proxy.so or the agent, with a socket to the
// library, its log and pinned memory as the files 3, 4 and 5. It lives as long as the client does.
#include <dlfcn.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "ground/environment.h"
#include "proxy/server/server.h"
#include "proxy/transport/answer.h"
#include "proxy/transport/cores.h"
#include "proxy/transport/shared_file.h"
#include "proxy/transport/spin.h"
#include "real_calls.h"

namespace jitckpt::proxy {
namespace {

void greet(const char* failure) {
  wire::ServerGreeting greeting{table_hash, failure == nullptr, {}};
  put_text(greeting.text, sizeof greeting.text, failure ? failure : "");
  if (send(wire::socket_file, &greeting, sizeof greeting, MSG_NOSIGNAL) != sizeof greeting) _exit(0);
}

[[noreturn]] void fail(const std::exception& error) {
  std::fprintf(stderr, "jitckpt: the device proxy's server: %s\n", error.what());
  greet(error.what());
  _exit(1);
}

// Returns once the client has said something or ended: the socket ends with its last holder, the process
// file with the process itself, whoever has inherited the socket.
void wait_for_client(int client_process) {
  pollfd news[] = {{wire::socket_file, POLLIN, 0}, {client_process, POLLIN, 0}};
  while (poll(news, 2, -1) < 0) {
  }
  if (news[1].revents != 0) _exit(0);
}

template <class T>
T hear(int client_process) {
  T heard{};
  wait_for_client(client_process);
  if (recv(wire::socket_file, &heard, sizeof heard, 0) < static_cast<ssize_t>(sizeof heard.word)) _exit(0);
  return heard;
}

template <class T>
void say(const T& word) {
  if (send(wire::socket_file, &word, sizeof word, MSG_NOSIGNAL) != sizeof word) _exit(0);
}

void say_done(uint32_t word, bool done) { say(done ? word : uint32_t{0}); }

void copy_state(const wire::ServerOrder& order) {
  say_done(wire::copy_state, copy_to_host(reinterpret_cast<const wire::Range*>(order.first), order.second));
}

// Between two servers: nothing is under way.
void obey(const wire::ServerOrder& order, Kept& kept) {
  if (order.word == wire::rest)
    return say(wire::Rested{wire::rest, kept.state.intact, 0, kept.state.changed, kept.state.ended});
  if (order.word == wire::copy_state) return copy_state(order);
  say_done(order.word, false);
}

// Does what the client asks for, until it says that the log can be read: makes ids, loads libraries.
void prepare(int client_process, Kept& kept) {
  for (;;) {
    const auto heard = hear<wire::Load>(client_process);
    if (heard.word == wire::begin) return;
    if (heard.word >= wire::reset_but_memory && heard.word != wire::load) {
      wire::ServerOrder order;
      std::memcpy(&order, &heard, sizeof order);
      obey(order, kept);
      continue;
    }
    if (heard.word == wire::load) {
      // If it can't be loaded, the call that needs it says so.
      const std::string path(heard.path, strnlen(heard.path, sizeof heard.path));
      dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
      continue;
    }
    for (uint32_t made = 0; made < heard.word; ++made) {
      ncclUniqueId id{};
      if (real::ncclGetUniqueId(&id) != ncclSuccess)
        throw std::runtime_error(real::ncclGetLastError(nullptr));
      say(id);
    }
  }
}

bool client_has_spoken() {
  pollfd news{wire::socket_file, POLLIN, 0};
  return poll(&news, 1, 0) != 0;
}

// Does what needs no stop, and returns the order for one.
wire::ServerOrder hear_order_to_stop(int client_process, Server& server) {
  for (;;) {
    const auto order = hear<wire::ServerOrder>(client_process);
    if (order.word == wire::settle) {
      if (const auto settled = server.settle(client_has_spoken)) say(*settled);
    } else if (order.word == wire::copy_state) {
      copy_state(order);
    } else {
      return order;
    }
  }
}

// While the log is read: ends this process with the client's, or has the server stop. Returns what for.
void listen(int client_process, Server& server, uint32_t& word) {
  word = hear_order_to_stop(client_process, server).word;
  if (word != wire::rest && word != wire::reset) _exit(0);
  if (server.stop()) return;
  // The reader waits for other ranks in NCCL, which nobody can end. What the device holds can still be
  // copied.
  if (word == wire::reset) _exit(1);
  say(server.rests_not());
  for (;;) {
    const auto order = hear<wire::ServerOrder>(client_process);
    if (order.word != wire::copy_state) _exit(1);
    copy_state(order);
  }
}

// A server that has stopped. Returns what it leaves.
Kept at_rest(uint32_t word, int client_process, Server& server) {
  for (wire::ServerOrder order{word, 0, 0};; order = hear<wire::ServerOrder>(client_process)) {
    switch (order.word) {
      case wire::rest:
        say(server.come_to_rest());
        break;
      case wire::finish:
        say_done(order.word, server.finish(order.first));
        break;
      case wire::copy_state:
        copy_state(order);
        break;
      case wire::reset:
      case wire::reset_but_memory: {
        if (!server.drop_all()) _exit(1);
        Kept kept = server.leave();
        // The next server asks for the same memory, and new pages would cost it more than the calls do.
        if (order.word == wire::reset) kept.state = {};
        say(order.word);
        return kept;
      }
      default:
        _exit(0);
    }
  }
}

// Where and with what it may run: as the client, whoever has started this process.
void be_like(pid_t client) {
  const auto failed = [client](const char* what) {
    std::fprintf(stderr, "jitckpt: the device proxy's server can't take the %s of process %d: %s\n", what,
                 client, std::strerror(errno));
  };
  cpu_set_t cores;
  if (sched_getaffinity(client, sizeof cores, &cores) != 0 || sched_setaffinity(0, sizeof cores, &cores) != 0)
    return failed("cores");
  const std::string folder = "/proc/" + std::to_string(client) + "/cwd";
  if (chdir(folder.c_str()) != 0) return failed("folder");
  for (int kind = 0; kind < RLIM_NLIMITS; ++kind) {
    const auto resource = static_cast<__rlimit_resource>(kind);
    rlimit limit{};
    if (prlimit(client, resource, nullptr, &limit) != 0 || setrlimit(resource, &limit) != 0)
      return failed("limits");
  }
}

// For a device whose kernels run in this process's threads, such as softgpu. Those wait for the reader, and
// it for them: with a core for all, the one's cache has what the other has written, and to wake each other up
// takes a fifth of what it takes across cores. Where cores are scarce, others have use for the rest.
void stay_on_one_core() {
  if (read(environment::proxy_one_core) != 1) return;
  const std::optional<int> core = core_of_rank(allowed_cores(), ranks_here(), rank_here());
  if (!core) return;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(*core, &one);
  if (sched_setaffinity(0, sizeof one, &one) != 0)
    std::fprintf(stderr, "jitckpt: the device proxy's server can't stay on core %d: %s\n", *core,
                 std::strerror(errno));
}

// Serves one log after the other, each from its own beginning; the process lives on between them.
[[noreturn]] void serve(const Log& log, int client_process) {
  const std::chrono::microseconds spin(read(environment::proxy_spin_us, usual_spin_time().count()));
  Kept kept;
  for (;;) {
    prepare(client_process, kept);
    const auto server = std::make_unique<Server>(log, std::exchange(kept, {}));
    uint32_t word = 0;
    std::thread listener(listen, client_process, std::ref(*server), std::ref(word));
    try {
      server->run(spin);
    } catch (const std::exception& error) {
      fail(error);
    }
    listener.join();
    kept = at_rest(word, client_process, *server);
  }
}

int run(pid_t client) {
  const int client_process = static_cast<int>(syscall(SYS_pidfd_open, client, 0));
  if (client_process < 0) return 0;  // it has ended already
  // A signal to the whole group (Ctrl-C, the end of a job) is for the program, which may need its device to
  // save.
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGPIPE})
    signal(number, SIG_IGN);
  be_like(client);  // before there are other threads
  stay_on_one_core();
  try {
    const SharedFile log_file(wire::log_file), pinned_file(wire::pinned_file);
    const Mapping log_mapping(log_file);
    const Log log(log_mapping.begin(), read_geometry(log_mapping.begin(), log_mapping.bytes()));
    if (log.control().table_hash != table_hash)
      throw std::runtime_error(
          "the program's library knows other calls: it is of a different version. Install jitckpt again");
    const Mapping pinned(pinned_file, reinterpret_cast<void*>(log.control().pinned_address));
    greet(nullptr);
    serve(log, client_process);
  } catch (const std::exception& error) {
    fail(error);
  }
}

}  // namespace
}  // namespace jitckpt::proxy

int main(int count, char** words) {
  if (count != 2) {
    std::fprintf(stderr,
                 "jitckpt-proxy-server is started by libjitckpt_proxy.so or by jitckpt run, not by hand (see "
                 "docs/how-it-works/proxy.md)\n");
    return 2;
  }
  // Without the destructors of a device's libraries, which have nobody left to work for.
  _exit(jitckpt::proxy::run(std::atoi(words[1])));
}
