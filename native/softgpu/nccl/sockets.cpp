#include "softgpu/nccl/sockets.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <vector>

#include "softgpu/nccl/failure.h"

namespace softgpu::nccl {
namespace {

bool starts_with(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

// Which interfaces the user wants.
class Choice {
 public:
  explicit Choice(std::string list) {
    excludes_ = starts_with(list, "^");
    if (excludes_) list.erase(0, 1);
    whole_ = starts_with(list, "=");
    if (whole_) list.erase(0, 1);
    std::istringstream names(list);
    for (std::string name; std::getline(names, name, ',');) {
      if (!name.empty()) names_.push_back(name);
    }
  }
  bool takes(const std::string& interface) const {
    const bool is_named = std::any_of(names_.begin(), names_.end(), [&](const std::string& name) {
      return whole_ ? interface == name : starts_with(interface, name);
    });
    return is_named != excludes_;
  }

 private:
  bool excludes_, whole_;
  std::vector<std::string> names_;
};

// Those that other hosts can reach come first.
int unfitness(const std::string& interface) {
  if (interface == "lo") return 2;
  return starts_with(interface, "docker") || starts_with(interface, "virbr") ? 1 : 0;
}

template <class T>
Address address_from(const T& specific) {
  Address address;
  std::memcpy(&address.storage, &specific, sizeof specific);
  address.length = sizeof specific;
  return address;
}

// Without a port; nothing if it is not an address that means the same on another host.
Address address_of_interface(const ifaddrs& interface) {
  if (!interface.ifa_addr) return {};
  if (interface.ifa_addr->sa_family == AF_INET) {
    return address_from(*reinterpret_cast<const sockaddr_in*>(interface.ifa_addr));
  }
  if (interface.ifa_addr->sa_family != AF_INET6) return {};
  const auto& address = *reinterpret_cast<const sockaddr_in6*>(interface.ifa_addr);
  return IN6_IS_ADDR_LINKLOCAL(&address.sin6_addr) ? Address{} : address_from(address);
}

[[noreturn]] void throw_aborted() {
  throw NcclFailure(ncclInternalError, "The communicator was aborted while it was being made.");
}

}  // namespace

std::string to_text(const Address& address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address.storage.ss_family == AF_INET) {
    const auto& specific = reinterpret_cast<const sockaddr_in&>(address.storage);
    inet_ntop(AF_INET, &specific.sin_addr, text, sizeof text);
    return std::string(text) + ':' + std::to_string(ntohs(specific.sin_port));
  }
  if (address.storage.ss_family == AF_INET6) {
    const auto& specific = reinterpret_cast<const sockaddr_in6&>(address.storage);
    inet_ntop(AF_INET6, &specific.sin6_addr, text, sizeof text);
    return '[' + std::string(text) + "]:" + std::to_string(ntohs(specific.sin6_port));
  }
  return "a socket of this host";
}

Address address_from(const std::string& text) {
  const size_t colon = text.rfind(':');
  char* end = nullptr;
  const char* digits = colon == std::string::npos ? "" : text.c_str() + colon + 1;
  const unsigned long port = std::strtoul(digits, &end, 10);
  std::string name = text.substr(0, colon);
  if (*digits != 0 && *end == 0 && port > 0 && port < 65536) {
    sockaddr_in four{.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {}, .sin_zero = {}};
    if (inet_pton(AF_INET, name.c_str(), &four.sin_addr) == 1) return address_from(four);
    if (name.size() > 2 && name.front() == '[' && name.back() == ']') {
      sockaddr_in6 six{};
      six.sin6_family = AF_INET6;
      six.sin6_port = htons(port);
      name = name.substr(1, name.size() - 2);
      if (inet_pton(AF_INET6, name.c_str(), &six.sin6_addr) == 1) return address_from(six);
    }
  }
  throw NcclFailure(ncclInvalidArgument, "'", text, "' is not an address with a port.");
}

Address abstract_address(const std::string& name) {
  sockaddr_un specific{};
  specific.sun_family = AF_UNIX;
  name.copy(specific.sun_path + 1, sizeof specific.sun_path - 1);  // the zero before it makes it abstract
  Address address = address_from(specific);
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Address own_address() {
  const char* given = std::getenv("NCCL_SOCKET_IFNAME");
  const std::string names = given ? given : "";
  const Choice choice(names.empty() ? "^" : names);
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) {
    throw NcclFailure(ncclSystemError,
                      "Cannot list the network interfaces (getifaddrs: ", std::strerror(errno), ").");
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> all(first, freeifaddrs);
  Address best;
  int best_unfitness = 0;
  for (const ifaddrs* interface = first; interface; interface = interface->ifa_next) {
    constexpr unsigned usable = IFF_UP | IFF_RUNNING;
    if ((interface->ifa_flags & usable) != usable || !choice.takes(interface->ifa_name)) continue;
    const Address address = address_of_interface(*interface);
    if (address.length == 0) continue;
    if (best.length == 0 || unfitness(interface->ifa_name) < best_unfitness) {
      best = address;
      best_unfitness = unfitness(interface->ifa_name);
    }
  }
  if (best.length == 0) {
    throw NcclFailure(ncclInvalidUsage, "No network interface that is up and has an address",
                      names.empty() ? "" : " fits NCCL_SOCKET_IFNAME=", names,
                      ". NCCL's processes find each other through one, if only through lo.");
  }
  return best;
}

FileDescriptor listen_at(const Address& address) {
  FileDescriptor listener(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener || bind(listener.get(), address.get(), address.length) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    throw NcclFailure(ncclSystemError, "Cannot listen at ", to_text(address),
                      " for the ranks of a new communicator (", std::strerror(errno), ").");
  }
  return listener;
}

Address address_of(const FileDescriptor& listener) {
  Address address;
  address.length = sizeof address.storage;
  getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address.storage), &address.length);
  return address;
}

void wait_for(const FileDescriptor& socket, short events, const std::atomic<bool>& aborted) {
  pollfd ready{socket.get(), events, 0};
  while (poll(&ready, 1, abort_poll_milliseconds) <= 0) {
    if (aborted) throw_aborted();
  }
  if (aborted) throw_aborted();
}

FileDescriptor connect_to(const Address& address, const std::atomic<bool>& aborted) {
  FileDescriptor socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw NcclFailure(ncclSystemError, "No socket for NCCL (", std::strerror(errno), ").");
  const auto refuse = [&](int error) {
    throw NcclFailure(
        ncclRemoteError, "Nobody listens for ranks with this unique id at ", to_text(address), " (",
        std::strerror(error),
        "): the process there has ended, all ranks have come already, or no network leads there.");
  };
  while (connect(socket.get(), address.get(), address.length) != 0) {
    if (errno == EAGAIN) {  // a Unix socket whose queue is full
      if (aborted) throw_aborted();
      poll(nullptr, 0, abort_poll_milliseconds);
    } else if (errno == EINPROGRESS) {
      wait_for(socket, POLLOUT, aborted);
      int error = 0;
      socklen_t length = sizeof error;
      getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      if (error != 0) refuse(error);
      break;
    } else if (errno != EINTR) {
      refuse(errno);
    }
  }
  if (address.storage.ss_family != AF_UNIX) {
    const int on = 1;  // what is told is waited for
    setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return socket;
}

void send_all(const FileDescriptor& socket, const void* data, size_t bytes,
              const std::atomic<bool>& aborted) {
  const auto* at = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(socket.get(), at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      at += sent;
      bytes -= sent;
    } else if (errno == EAGAIN) {
      wait_for(socket, POLLOUT, aborted);
    } else if (errno != EINTR) {
      throw NcclFailure(ncclRemoteError, "A process of this communicator ended while it was being made (",
                        std::strerror(errno), ").");
    }
  }
}

void receive_all(const FileDescriptor& socket, void* data, size_t bytes, const std::atomic<bool>& aborted) {
  auto* at = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t received = recv(socket.get(), at, bytes, MSG_DONTWAIT);
    if (received > 0) {
      at += received;
      bytes -= received;
    } else if (received < 0 && errno == EAGAIN) {
      wait_for(socket, POLLIN, aborted);
    } else if (received == 0 || errno != EINTR) {
      throw NcclFailure(ncclRemoteError, "A process of this communicator ended while it was being made (",
                        received == 0 ? "connection closed" : std::strerror(errno), ").");
    }
  }
}

}  // namespace softgpu::nccl
