// Hosts with a network of their own: network namespaces of the kernel, each with an interface eth0 on one
// switch. They have no names, and go with the last process that uses them, however that ends.
#pragma once
#include <string>
#include <vector>

#include "softgpu/nccl/file_descriptor.h"

class Namespaces {
 public:
  // Why there can be none: empty if there can.
  static std::string unavailable();

  // Interfaces eth0 have the addresses 10.77.0.1, 10.77.0.2 ...; interfaces eth1 10.78.0.1 ...
  explicit Namespaces(int hosts);

  // Makes this process, which has no other thread, one of the host.
  void enter(int host) const;
  // Takes its eth0 from the network, and gives it back.
  void cut(int host) const { run(host, "ip link set eth0 down"); }
  void mend(int host) const { run(host, "ip link set eth0 up"); }
  // Runs a command there; fails the test if it fails.
  void run(int host, const std::string& command) const;

 private:
  std::vector<softgpu::nccl::FileDescriptor> hosts_;
};
