"""A policy at 200 Hz that keeps learning: predict, act, observe.

    pip install 'kbt-edge[demo]' && python examples/control_loop.py

The cart-pole stands for your machine. The LQR of the changed plant stands for your teacher: an operator, a slow
planner, or a measurement that arrives later. Replace the three marked lines with your own.
"""

import time

import numpy as np

import kbt_edge as kbt
from kbt_edge.studies import cartpole

RATE = 200.0  # Hz
TEACH = 2.0  # s, while a teacher corrects every step

model = kbt.Model.load("cartpole")  # trained on another plant
gain = cartpole.lqr_gain(cartpole.NEW)
state = np.array([0.5, 0.0, 0.1, 0.0])  # cart (m, m/s), pole (rad, rad/s)
late = 0
due = time.perf_counter()
for step in range(int(10 * RATE)):
    p = model.predict(state)  # newtons; p.std is the model's uncertainty, p.total_std that of an observation
    force = p.mean[0]
    if step < TEACH * RATE:
        target = -gain @ state  # 1. your teacher
        if p.total_std[0] > 5.0:  # too uncertain: let the teacher act
            force = target
        model.observe(target)  # learned before the next step; the trunk does not run again
    if step % RATE == 0:
        print(f"{step / RATE:4.0f} s   pole {np.degrees(state[2]):6.2f}°   force {force:6.2f} N ± {p.total_std[0]:.2f}")
    state = cartpole.NEW.step(state, np.array(force), 1.0 / RATE)  # 2. your actuator and 3. your sensors

    due += 1.0 / RATE
    late += time.perf_counter() > due
    time.sleep(max(0.0, due - time.perf_counter()))
print(
    f"{late} of {step + 1} steps were late; the pole is {np.degrees(abs(state[2])):.2f}° off, the cart {state[0]:.2f} m"
)
model.save("cartpole-adapted")
