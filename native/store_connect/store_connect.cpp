// libjitckpt_store.so: preloaded where workers may move. A connection to the job's store becomes one to the
// agent's relay (jitckpt/agent/migration/store_relay.py), which outlives a move of either end. The descriptor
// keeps its number and flags, so that torch's client does not notice. Where the relay can't be reached, the
// connection is the plain one.
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "ground/environment.h"

namespace {

namespace environment = jitckpt::environment;

using Connect = int (*)(int, const sockaddr*, socklen_t);
using SetOption = int (*)(int, int, int, const void*, socklen_t);

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// ADDRESS:PORT as in store_addresses; IPv4 in IPv6 is the same as without. Returns an empty view for what is
// no IP address.
std::string_view written(const sockaddr* address, socklen_t length,
                         char (&room)[NI_MAXHOST + NI_MAXSERV + 1]) {
  if (address == nullptr || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) return {};
  char port[NI_MAXSERV];
  if (getnameinfo(address, length, room, NI_MAXHOST, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return {};
  constexpr std::string_view kMapped = "::ffff:";
  char* begin = room;
  if (std::string_view(room).starts_with(kMapped) && std::strchr(room, '.') != nullptr)
    begin += kMapped.size();
  std::strcat(std::strcat(begin, ":"), port);
  return begin;
}

bool is_listed(std::string_view one, const char* list) {
  for (std::string_view rest = list; !one.empty() && !rest.empty();) {
    const std::size_t end = rest.find(' ');
    if (rest.substr(0, end) == one) return true;
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  return false;
}

// Returns a connection to the relay, which listens at an abstract name; -1 if there is none of this user.
int connected_to_relay(const char* name, Connect connect) {
  sockaddr_un place{};
  place.sun_family = AF_UNIX;
  const std::size_t size = std::strlen(name);
  if (size + 1 > sizeof place.sun_path) return -1;
  std::memcpy(place.sun_path + 1, name, size);
  const int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (made < 0) return -1;
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  ucred peer{};
  socklen_t room = sizeof peer;
  if (connect(made, reinterpret_cast<const sockaddr*>(&place), length) == 0 &&
      getsockopt(made, SOL_SOCKET, SO_PEERCRED, &peer, &room) == 0 && peer.uid == geteuid()) {
    return made;
  }
  close(made);
  return -1;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int connect(int file, const sockaddr* address,
                                                              socklen_t length) {
  static const auto real = next<Connect>("connect");
  // Read at each call, as a process that was forked from a template has others than that.
  const char* relay = environment::read(environment::store_relay);
  const char* addresses = environment::read(environment::store_addresses);
  char room[NI_MAXHOST + NI_MAXSERV + 1];
  if (relay == nullptr || addresses == nullptr || !is_listed(written(address, length, room), addresses)) {
    return real(file, address, length);
  }
  const int made = connected_to_relay(relay, real);
  if (made < 0) return real(file, address, length);
  fcntl(made, F_SETFL, fcntl(file, F_GETFL));
  const int closes = (fcntl(file, F_GETFD) & FD_CLOEXEC) != 0 ? O_CLOEXEC : 0;
  const bool placed = dup3(made, file, closes) >= 0;
  close(made);
  return placed ? 0 : real(file, address, length);
}

// What TCP may be told makes no sense for the socket in its place, and is no failure.
extern "C" __attribute__((visibility("default"))) int setsockopt(int file, int level, int name,
                                                                 const void* value, socklen_t size) {
  static const auto real = next<SetOption>("setsockopt");
  const int result = real(file, level, name, value, size);
  if (result == 0 || level != IPPROTO_TCP || errno != EOPNOTSUPP ||
      environment::read(environment::store_relay) == nullptr)
    return result;
  int domain = 0;
  socklen_t room = sizeof domain;
  return getsockopt(file, SOL_SOCKET, SO_DOMAIN, &domain, &room) == 0 && domain == AF_UNIX ? 0 : result;
}
