// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "crypto_test.h"

void crypto_native_run(struct crypto_case *c);

void crypto_native_run(struct crypto_case *c)
{
	c->result = crypto_case_run(c);
}
