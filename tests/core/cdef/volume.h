/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of volume.h, as far as the tests need them. */

struct ckv_region {
    struct ckv_region_layout layout;
    struct ckv_region_header *header;
    struct ckv_shared_event *events;
    ...;
};

struct ckv_volume {
    struct ckv_region region;
    ckv_atomic_u64 *counters;
    ...;
};
