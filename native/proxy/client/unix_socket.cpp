#include "proxy/client/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>

namespace jitckpt::proxy::client {

int connect_to(const std::string& path) {
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  if (path.size() >= sizeof address.sun_path) {
    errno = ENAMETOOLONG;
    return -1;
  }
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  const int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (made < 0 || connect(made, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0)
    return made;
  const int error = errno;
  close(made);
  errno = error;
  return -1;
}

}  // namespace jitckpt::proxy::client
