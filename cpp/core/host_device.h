// H2O_HD marks functions of host and device code.
#pragma once

#ifdef __CUDACC__
#define H2O_HD __host__ __device__
#else
#define H2O_HD
#endif
