// The same random programs on a device without the proxy: what their model says is what a device does.
#include <cstdlib>

#include "proxy/tests/copy_programs.h"
#include "proxy/tests/support.h"

int main(int argc, char** argv) {
  setenv("SOFTGPU_DEVICES", "1", 1);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

TEST(DirectCopies, ArePartOfProgramsThatSeeWhatTheyShould) {
  const char* const count = std::getenv("PROXY_TEST_PROGRAMS");
  CopyPrograms all({}, 8);
  for (uint32_t seed = 0; seed < (count ? std::strtoul(count, nullptr, 10) : 300); ++seed)
    ASSERT_EQ(all.run(seed), "");
}
