// jitckpt._step_barrier: the step barrier's memory for the agent of one of several hosts.
#include <pybind11/pybind11.h>

#include <chrono>
#include <memory>
#include <string>

#include "proxy/transport/together.h"

namespace py = pybind11;
using jitckpt::proxy::Together;

PYBIND11_MODULE(_step_barrier, module) {
  module.doc() =
      "The step barrier's memory, for an agent. Use it through jitckpt.agent.proxies.step_barrier.";
  module.attr("MAGIC") = Together::magic;
  module.attr("STEP_BITS") = Together::step_bits;
  py::class_<Together>(module, "Memory")
      .def(
          py::init([](const std::string& path) { return std::make_unique<Together>(path, Together::agent); }),
          py::arg("path"))
      .def("here",
           [](const Together& memory) {
             const Together::Come come = memory.here();
             return py::make_tuple(come.recovery_and_step, come.whole_from, come.left);
           })
      .def(
          "everywhere",
          [](Together& memory, uint64_t recovery_and_step, uint64_t whole_from, bool left) {
            memory.everywhere({recovery_and_step, whole_from, left});
          },
          py::arg("recovery_and_step"), py::arg("whole_from"), py::arg("left"))
      .def("happenings", &Together::happenings)
      .def("notify", &Together::notify)
      .def(
          "wait",
          [](const Together& memory, uint32_t seen, uint32_t milliseconds) {
            const py::gil_scoped_release released;
            memory.wait(seen, std::chrono::milliseconds(milliseconds));
          },
          py::arg("seen"), py::arg("milliseconds"));
}
