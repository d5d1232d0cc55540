# find_package(h2o): the targets h2o::h2o, the shared library, and h2o::static.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/h2o-targets.cmake)
