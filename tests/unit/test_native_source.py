"""What of a C++ file is a function, and what is a class, as the tests of the house read it."""

from native_source import read

SOURCE = r"""
#define BRACE {
template <class Value, class = int>
struct Held : Base<Value> {
  enum class Kind : uint32_t { memory = 0x53, event };
  Held() : kind_{Kind::memory}, more_(1), value_{} { use(R"(} { )" "}", '}', '"'); }
  bool operator==(const Held&) const = default;
  int operator()(int by = 1) const noexcept { return by * 1'000; }

 private:
  struct { int a; } nameless;
  Kind kind_ = Kind{};
};

/* class Commented { void lost() { */
namespace softgpu {
namespace {
struct alignas(64) Own {};
}  // namespace
static const char* const names[] = {"one", "{"};
const auto made = [](int one) { return Held<int>(one); };
class Own::Inner final : public Base {};
typedef enum { no, yes } answer_t;
extern "C" {
struct flock taken(void) { return flock{}; }
}
[[gnu::noinline]] auto look(std::vector<int> of = {}) -> int {
  const auto inner = [&] {
    return of[of[0]];
  };
  return inner();
}
}  // namespace softgpu
"""


def test_functions_are_found_with_their_lines() -> None:
    lines = {function.name: function.last - function.line + 1 for function in read(SOURCE).functions}
    assert lines == {"Held": 1, ")": 1, "taken": 1, "look": 6}


def test_classes_are_found_and_whether_another_file_can_name_them() -> None:
    public = {one.name: one.public for one in read(SOURCE).classes}
    assert public == {"Held": True, "Kind": False, "Own": False, "Own::Inner": False}
