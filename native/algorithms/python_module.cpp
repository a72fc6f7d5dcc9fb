// jitckpt._algorithms: the algorithms of this room for Python.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "algorithms/flush_network.h"

namespace py = pybind11;
using jitckpt::algorithms::FlushNetwork;
using jitckpt::algorithms::FlushPlan;
using jitckpt::algorithms::Link;
using jitckpt::algorithms::Unreachable;

namespace {

using Doubles = py::array_t<double, py::array::c_style | py::array::forcecast>;
using Integers = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using Flags = py::array_t<uint8_t, py::array::c_style | py::array::forcecast>;

FlushNetwork make_network(const Integers& source, const Integers& target, const Doubles& bytes_per_second,
                          const Flags& relays) {
  if (source.size() != target.size() || source.size() != bytes_per_second.size())
    throw std::invalid_argument("source, target and bytes_per_second must have one entry a link");
  std::vector<Link> links(static_cast<size_t>(source.size()));
  for (size_t l = 0; l < links.size(); ++l)
    links[l] = {source.data()[l], target.data()[l], bytes_per_second.data()[l]};
  return {
      static_cast<int32_t>(relays.size()), std::move(links), {relays.data(), relays.data() + relays.size()}};
}

py::tuple fastest(const FlushNetwork& network, const Doubles& supply, const Doubles& room) {
  if (supply.size() != network.vertices() || room.size() != network.vertices())
    throw std::invalid_argument("supply and room must have one entry a vertex");
  const FlushPlan plan = network.fastest(supply.data(), room.data());
  return py::make_tuple(plan.seconds,
                        Doubles(static_cast<py::ssize_t>(plan.link_bytes.size()), plan.link_bytes.data()),
                        plan.max_flows);
}

}  // namespace

PYBIND11_MODULE(_algorithms, module) {
  module.doc() = "Compiled algorithms of jitckpt. Use them through jitckpt.planning.";
  static py::handle unreachable =
      py::exception<Unreachable>(module, "Unreachable", PyExc_ValueError).release();
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const Unreachable& error) {
      py::object raised = unreachable(error.what());
      raised.attr("vertices") = error.vertices;
      PyErr_SetObject(unreachable.ptr(), raised.ptr());
    }
  });
  py::class_<FlushNetwork>(module, "FlushNetwork")
      .def(py::init(&make_network), py::arg("source"), py::arg("target"), py::arg("bytes_per_second"),
           py::arg("relays"))
      .def("fastest", &fastest, py::arg("supply"), py::arg("room"),
           "The least time in which every vertex's supply finds room, and how: (seconds, bytes of each link, "
           "number of maximum flows it took).");
}
