// jitckpt._pages: this room for Python, which lets go of its lock meanwhile.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "pages/file_digests.h"
#include "pages/page_index.h"

namespace py = pybind11;
using namespace jitckpt::pages;

namespace {

using Part = std::tuple<size_t, size_t, int64_t, std::string>;  // begin, end, same_as or -1, checksum

std::string hex(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest)
    for (const int half : {byte >> 4, byte & 15}) text += "0123456789abcdef"[half];
  return text;
}

std::vector<Part> parts(PageIndex& index, int file, uint64_t at, size_t size, uint64_t own) {
  const std::vector<Digest> digests = digests_of(file, at, size);
  std::vector<Run> runs = index.runs(std::span(digests).first(size / page_size), own);
  if (size % page_size) {  // the rest of a page stands nowhere else
    if (runs.empty() || runs.back().same_as != Run::none)
      runs.push_back({size / page_size, digests.size(), Run::none});
    runs.back().end = digests.size();
  }
  std::vector<Part> found;
  for (const Run& run : runs) {
    const bool is_new = run.same_as == Run::none;
    found.emplace_back(run.begin * page_size, std::min(run.end * page_size, size),
                       is_new ? -1 : static_cast<int64_t>(run.same_as),
                       is_new ? hex(whole(std::span(digests).subspan(run.begin, run.end - run.begin))) : "");
  }
  return found;
}

std::vector<Part> parts_unlocked(PageIndex& index, int file, uint64_t at, size_t size, uint64_t own) {
  try {
    const py::gil_scoped_release released;
    return parts(index, file, at, size, own);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
}

std::string checksum(const py::buffer& data) {
  const py::buffer_info info = data.request();
  if (info.ndim != 1 || info.itemsize != 1 || (info.size && info.strides[0] != 1))
    throw std::invalid_argument("bytes in one piece are needed");
  const py::gil_scoped_release released;
  const std::span bytes(static_cast<const std::byte*>(info.ptr), static_cast<size_t>(info.size));
  return hex(whole(digests_of(bytes)));
}

}  // namespace

PYBIND11_MODULE(_pages, module) {
  module.doc() =
      "The pages of files, and their checksums. Use it through jitckpt.agent.migration.same_pages.";
  module.attr("PAGE") = page_size;
  module.def("checksum", &checksum, py::arg("data"));
  py::class_<PageIndex>(module, "PageIndex")
      .def(py::init<size_t, size_t>(), py::arg("most"), py::arg("least"))
      .def("parts", &parts_unlocked, py::arg("file"), py::arg("at"), py::arg("size"), py::arg("own"));
}
