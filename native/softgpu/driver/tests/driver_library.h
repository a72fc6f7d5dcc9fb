// The driver library under test, opened by its path as programs open it by name.
#pragma once
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

inline void* driver_library() {
  static void* const library = dlopen(DRIVER_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  EXPECT_NE(library, nullptr) << dlerror();
  return library;
}

// Calls one of its functions, which is named as in the library (with its version).
template <class... Arguments>
int driver_call(const char* name, Arguments... arguments) {
  const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(driver_library(), name));
  EXPECT_NE(function, nullptr) << name;
  return function(arguments...);
}
