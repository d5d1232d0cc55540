# Any system from Linux, with the Clang of Zig (the PyPI package ziglang) and the libraries that it
# brings: cmake -DCMAKE_TOOLCHAIN_FILE=tools/zig/toolchain.cmake -DH2O_TARGET=x86_64-windows-gnu
# Targets are <aarch64|x86_64>-<linux-gnu.2.28|linux-musl|windows-gnu|macos.11.0-none>.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES H2O_TARGET)
string(REGEX MATCH "^(aarch64|x86_64)-(linux|windows|macos)" matched "${H2O_TARGET}")
if(NOT matched)
  message(FATAL_ERROR "H2O_TARGET: got '${H2O_TARGET}', expected such as x86_64-windows-gnu")
endif()
set(processor ${CMAKE_MATCH_1})
set(system ${CMAKE_MATCH_2})
set(cmake_linux Linux)
set(cmake_windows Windows)
set(cmake_macos Darwin)
if(NOT H2O_TARGET MATCHES "^${CMAKE_HOST_SYSTEM_PROCESSOR}-linux-gnu")  # which runs here
  set(CMAKE_SYSTEM_PROCESSOR ${processor})
  set(CMAKE_SYSTEM_NAME ${cmake_${system}})
endif()
foreach(language C CXX)
  set(CMAKE_${language}_FLAGS_INIT "-target ${H2O_TARGET}")
  set(CMAKE_${language}_FLAGS_RELEASE_INIT -g0)  # Zig writes what debuggers need unless told not to
endforeach()
set(CMAKE_C_COMPILER ${CMAKE_CURRENT_LIST_DIR}/cc)
set(CMAKE_CXX_COMPILER ${CMAKE_CURRENT_LIST_DIR}/c++)
set(CMAKE_AR ${CMAKE_CURRENT_LIST_DIR}/ar CACHE FILEPATH "")
set(CMAKE_RANLIB ${CMAKE_CURRENT_LIST_DIR}/ranlib CACHE FILEPATH "")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
if(H2O_TARGET MATCHES musl AND DEFINED ENV{H2O_MUSL})  # the loader, where the system's lacks statx
  set(CMAKE_EXE_LINKER_FLAGS_INIT "-Wl,--dynamic-linker=$ENV{H2O_MUSL}")
endif()
if(system STREQUAL windows)
  # Objects would contain the name of Zig's temporary file.
  string(APPEND CMAKE_CXX_FLAGS_RELEASE_INIT " -Xclang -object-file-name=")
  set(CMAKE_CROSSCOMPILING_EMULATOR wine)
elseif(system STREQUAL macos)
  set(CMAKE_USER_MAKE_RULES_OVERRIDE ${CMAKE_CURRENT_LIST_DIR}/macos.cmake)
elseif(H2O_TARGET MATCHES "^aarch64-linux" AND NOT CMAKE_HOST_SYSTEM_PROCESSOR STREQUAL aarch64)
  set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
endif()
