# After CMake's rules for macOS, whose version it asks of the machine that builds: elsewhere it knows
# no @rpath, and names the folder of the build in a library.
set(CMAKE_SHARED_LIBRARY_RUNTIME_C_FLAG -Wl,-rpath,)
