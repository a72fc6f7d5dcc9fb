#include "softgpu/nccl/tests/namespaces.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

using softgpu::nccl::FileDescriptor;

namespace {

template <class Work>
int in_child(Work work) {
  const pid_t pid = fork();
  if (pid == 0) _exit(work());
  int status = -1;
  waitpid(pid, &status, 0);
  return status;
}

// It lives as long as its file is open.
FileDescriptor make_namespace() {
  int ready[2];
  EXPECT_EQ(pipe2(ready, O_CLOEXEC), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    const bool made = unshare(CLONE_NEWNET) == 0;
    if (write(ready[1], &made, sizeof made) == sizeof made) pause();
    _exit(0);
  }
  bool made = false;
  EXPECT_EQ(read(ready[0], &made, sizeof made), static_cast<ssize_t>(sizeof made));
  EXPECT_TRUE(made);
  FileDescriptor file(open(("/proc/" + std::to_string(pid) + "/ns/net").c_str(), O_RDONLY));
  EXPECT_TRUE(file);
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  close(ready[0]);
  close(ready[1]);
  return file;
}

}  // namespace

std::string Namespaces::unavailable() {
  const bool allowed = in_child([] { return unshare(CLONE_NEWNET) == 0 ? 0 : 1; }) == 0;
  if (!allowed) return "this user may not make network namespaces (unshare: needs CAP_SYS_ADMIN)";
  const bool has_tool = in_child([] { return std::system("ip -V > /dev/null 2>&1"); }) == 0;
  return has_tool ? "" : "the command ip (package iproute2) is not there";
}

Namespaces::Namespaces(int hosts) {
  for (int i = 0; i <= hosts; ++i) hosts_.push_back(make_namespace());  // the last one is the switch
  run(hosts, "ip link add switch type bridge && ip link set switch up");
  for (int host = 0; host < hosts; ++host) {
    const std::string number = std::to_string(host), address = std::to_string(host + 1);
    const std::string there =
        "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(hosts_[host].get());
    run(host, "ip link set lo up");
    for (const std::string interface : {"0", "1"}) {
      const std::string port = "port" + number + "." + interface, name = "eth" + interface;
      run(hosts, "ip link add " + port + " type veth peer name " + name + " netns " + there +
                     " && ip link set " + port + " master switch up");
      run(host, "ip address add 10.7" + std::to_string(7 + (interface == "1")) + ".0." + address +
                    "/24 dev " + name + " && ip link set " + name + " up");
    }
  }
  for (int host = 0; host < hosts; ++host) {  // the kernel takes its time to see that they are plugged in
    for (const char* name : {"eth0", "eth1"}) {
      run(host, std::string("until ip -o link show ") + name + " | grep -q 'state UP'; do sleep 0.02; done");
    }
  }
}

void Namespaces::enter(int host) const {
  ASSERT_EQ(setns(hosts_[host].get(), CLONE_NEWNET), 0) << std::strerror(errno);
}

void Namespaces::run(int host, const std::string& command) const {
  const int status = in_child([&] {
    if (setns(hosts_[host].get(), CLONE_NEWNET) != 0) return 1;
    return std::system(command.c_str()) == 0 ? 0 : 1;
  });
  ASSERT_EQ(status, 0) << command;
}
