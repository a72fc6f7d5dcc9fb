// jitckpt._memory_tier: this room for Python, which lets go of its lock meanwhile.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "memory_tier/failure.h"
#include "memory_tier/parity.h"
#include "memory_tier/transfer.h"

namespace py = pybind11;
using namespace jitckpt::memory_tier;

namespace {

using Digests = std::vector<Digest>;

Digests digests_in(const py::sequence& given) {
  Digests digests(given.size());
  for (size_t number = 0; number < digests.size(); ++number) {
    const auto one = given[number].cast<std::string>();
    if (one.size() != digests[number].size()) throw std::invalid_argument("a checksum has 16 bytes");
    std::copy(one.begin(), one.end(), digests[number].begin());
  }
  return digests;
}

py::list as_bytes(const Digests& digests) {
  py::list found;
  for (const Digest& one : digests)
    found.append(py::bytes(reinterpret_cast<const char*>(one.data()), one.size()));
  return found;
}

ChunkConnection connection_of(int socket, int stop, double patience) {
  return {socket, stop,
          std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(patience))};
}

Pace::Clock::duration in_clock(double seconds) {
  return std::chrono::duration_cast<Pace::Clock::duration>(std::chrono::duration<double>(seconds));
}

const char* name_of(Reason reason) {
  switch (reason) {
    case Reason::ended:
      return "ended";
    case Reason::silent:
      return "silent";
    case Reason::stopped:
      return "stopped";
    case Reason::damaged:
      return "damaged";
    case Reason::refused:
      return "refused";
    case Reason::nonsense:
      return "nonsense";
    case Reason::no_memory:
      return "no_memory";
  }
  return "";
}

// The words stand at these places of each rank's.
void listen_to_ranks(Pace& pace, const std::vector<Window>& ranks, size_t began, size_t awaited,
                     size_t uses) {
  for (const Window& rank : ranks)
    if (rank.bytes().size() < std::max({began, awaited, uses}) + sizeof(uint64_t) || began % 8 ||
        awaited % 8 || uses % 8)
      throw std::invalid_argument("there are no words at those places");
  const auto word = [](const Window& rank, size_t place) {
    return __atomic_load_n(reinterpret_cast<const uint64_t*>(rank.bytes().data() + place), __ATOMIC_ACQUIRE);
  };
  const auto newest = [ranks, began, word] {
    const std::chrono::nanoseconds since(ranks.empty() ? 0 : word(ranks.front(), began));
    return Pace::Clock::time_point(std::chrono::duration_cast<Pace::Clock::duration>(since));
  };
  const auto any = [ranks, word](size_t place) {
    return [ranks, word, place] {
      return std::any_of(ranks.begin(), ranks.end(),
                         [&](const Window& rank) { return word(rank, place) != 0; });
    };
  };
  pace.listen({newest, any(awaited), any(uses)});
}

void add_failure(py::module_& module) {
  static py::handle failed = py::exception<ChunkFailure>(module, "Failure", PyExc_OSError).release();
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const ChunkFailure& error) {
      py::object raised = failed(error.what());
      raised.attr("reason") = name_of(error.reason);
      raised.attr("chunk") = error.chunk;
      PyErr_SetObject(failed.ptr(), raised.ptr());
    }
  });
}

void add_window(py::module_& module) {
  py::class_<Window>(module, "Window", py::buffer_protocol(),
                     "A shard's data in a memfd that can't shrink, cut into chunks.")
      .def(py::init<int, uint64_t, uint64_t, uint64_t>(), py::arg("descriptor"), py::arg("offset"),
           py::arg("size"), py::arg("chunk"), py::call_guard<py::gil_scoped_release>())
      .def_buffer([](const Window& window) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(window.bytes().data()),
                               static_cast<py::ssize_t>(window.bytes().size()), !window.is_writable());
      })
      .def("part", &Window::part, py::arg("first"), py::arg("count"))
      .def_property_readonly("size", [](const Window& window) { return window.bytes().size(); });
}

void add_pace(py::module_& module) {
  py::class_<Pace>(module, "Pace", "When how much may be sent; one for all that a host sends.")
      .def(py::init())
      .def(
          "set_rate",
          [](Pace& pace, double bytes_per_second, double spare) {
            pace.set_rate(bytes_per_second, in_clock(spare));
          },
          py::arg("bytes_per_second"), py::arg("spare") = 0.0,
          "So fast; for `spare` seconds it makes way where the training uses the network.")
      .def(
          "set_schedule",
          [](Pace& pace, const std::vector<std::tuple<double, double, uint64_t>>& given, double minibatch,
             double bytes_per_second) {
            std::vector<Pace::Slot> slots;
            for (const auto& [begin, end, bytes] : given)
              slots.push_back({in_clock(begin), in_clock(end), bytes});
            pace.set_schedule(std::move(slots), in_clock(minibatch), bytes_per_second);
          },
          py::arg("slots"), py::arg("minibatch"), py::arg("bytes_per_second"),
          "Send in slots of a minibatch: begin and end of the span (in seconds), and bytes, of each.")
      .def(
          "listen", &listen_to_ranks, py::arg("ranks"), py::arg("began"), py::arg("awaited"),
          py::arg("uses_network"),
          "Hear of the ranks, by words at these places: when the newest minibatch began (CLOCK_MONOTONIC, in "
          "ns; the first rank's counts), whether the training waits for what is sent, and whether it uses "
          "the network.");
}

void add_sum(py::module_& module) {
  py::class_<Sum>(module, "Sum", "The XOR of pieces of several shards, which grows in memory as they come.")
      .def(py::init())
      .def(
          "add",
          [](Sum& sum, uint32_t piece, uint64_t number, const py::buffer& chunk, const Window& to) {
            const py::buffer_info source = chunk.request();
            const py::gil_scoped_release released;
            sum.add(piece, number,
                    {static_cast<const std::byte*>(source.ptr),
                     static_cast<size_t>(source.size * source.itemsize)},
                    to);
          },
          py::arg("piece"), py::arg("number"), py::arg("chunk"), py::arg("to"))
      .def("added", &Sum::added, py::arg("piece"), py::call_guard<py::gil_scoped_release>())
      .def("end", &Sum::end, py::call_guard<py::gil_scoped_release>())
      .def(
          "receive",
          [](Sum& sum, uint32_t piece, const Window& to, int socket, uint64_t size, const py::sequence& given,
             double patience, int stop) {
            const Digests digests = digests_in(given);
            ChunkConnection connection = connection_of(socket, stop, patience);
            const py::gil_scoped_release released;
            receive_each(connection, size, to.chunk_size(), digests,
                         [&](uint64_t number, std::span<const std::byte> chunk) {
                           sum.add(piece, number, chunk, to);
                         });
          },
          py::arg("piece"), py::arg("to"), py::arg("socket"), py::arg("size"), py::arg("digests"),
          py::arg("patience"), py::arg("stop") = -1);
}

void add_functions(py::module_& module) {
  module.def(
      "digests",
      [](const Window& window) {
        Digests found;
        {
          const py::gil_scoped_release released;
          found = digests_of(window);
        }
        return as_bytes(found);
      },
      py::arg("window"), "The checksums of a window's chunks.");
  module.def(
      "verify",
      [](const Window& window, const py::sequence& given) {
        const Digests digests = digests_in(given);
        const py::gil_scoped_release released;
        verify(window, digests);
      },
      py::arg("window"), py::arg("digests"));
  module.def(
      "copy",
      [](const Window& window, const py::sequence& given, const py::buffer& to) {
        const Digests digests = digests_in(given);
        const py::buffer_info target = to.request(true);
        const py::gil_scoped_release released;
        copy(window, digests,
             {static_cast<std::byte*>(target.ptr), static_cast<size_t>(target.size * target.itemsize)});
      },
      py::arg("window"), py::arg("digests"), py::arg("to"));
  module.def(
      "send",
      [](int socket, const Window& window, const py::sequence& given, Pace& pace, double patience, int stop) {
        const Digests digests = digests_in(given);
        ChunkConnection connection = connection_of(socket, stop, patience);
        const py::gil_scoped_release released;
        send_chunks(connection, window, digests, pace);
      },
      py::arg("socket"), py::arg("window"), py::arg("digests"), py::arg("pace"), py::arg("patience"),
      py::arg("stop") = -1);
  module.def(
      "receive",
      [](int socket, const Window& window, const py::sequence& given, double patience, int stop) {
        const Digests digests = digests_in(given);
        ChunkConnection connection = connection_of(socket, stop, patience);
        const py::gil_scoped_release released;
        receive_chunks(connection, window, digests);
      },
      py::arg("socket"), py::arg("window"), py::arg("digests"), py::arg("patience"), py::arg("stop") = -1);
}

}  // namespace

PYBIND11_MODULE(_memory_tier, module) {
  module.doc() = "Chunks of the memory tier, outside of Python's lock. Use it through jitckpt.tiers.";
  add_failure(module);
  add_window(module);
  add_pace(module);
  add_sum(module);
  add_functions(module);
}
