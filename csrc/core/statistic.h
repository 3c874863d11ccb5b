/* SPDX-License-Identifier: Apache-2.0 */
/* statistic.h: totals over the slots of all processes, and gauges read from the
 * region. */
#ifndef CKV_STATISTIC_H
#define CKV_STATISTIC_H

#include "volume.h"

void ckv_statistic_read(struct ckv_volume *volume, struct ckv_stats *total,
    struct ckv_stats *process);

#endif /* CKV_STATISTIC_H */
