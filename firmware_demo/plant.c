/* plant.c - equations of motion of kbt_edge/studies/cartpole.py, in float32. */
#include "plant.h"

#include <math.h>

static const float kCartMass = 1.0F, kPoleMass = 1.0F, kLength = 5.0F, kGravity = 9.81F; /* kg, kg, m, m/s^2 */

static PlantState derivative(PlantState s, float force) {
  const float mass = kCartMass + kPoleMass, lever = kPoleMass * kLength / mass;
  const float sine = sinf(s.theta), cosine = cosf(s.theta);
  const float push = force / mass + lever * s.omega * s.omega * sine;
  PlantState rate;
  rate.x = s.v;
  rate.theta = s.omega;
  rate.omega = (kGravity * sine - cosine * push) / (4.0F / 3.0F * kLength - lever * cosine * cosine);
  rate.v = push - lever * cosine * rate.omega;
  return rate;
}

static PlantState ahead(PlantState s, float dt, PlantState rate) {
  const PlantState next = {s.x + dt * rate.x, s.v + dt * rate.v, s.theta + dt * rate.theta, s.omega + dt * rate.omega};
  return next;
}

PlantState plant_step(PlantState s, float force) { /* classical Runge-Kutta */
  const float dt = 1.0F / PLANT_RATE;
  const PlantState k1 = derivative(s, force), k2 = derivative(ahead(s, 0.5F * dt, k1), force);
  const PlantState k3 = derivative(ahead(s, 0.5F * dt, k2), force), k4 = derivative(ahead(s, dt, k3), force);
  s = ahead(s, dt / 6.0F, k1);
  s = ahead(s, dt / 3.0F, k2);
  s = ahead(s, dt / 3.0F, k3);
  return ahead(s, dt / 6.0F, k4);
}

float plant_expert(PlantState s) { /* LQR with Q = I, R = 1: kbt_edge.studies.cartpole.lqr_gain(NEW) */
  return 1.0F * s.x + 3.6719014F * s.v + 80.848429F * s.theta + 60.281677F * s.omega;
}

int plant_balanced(PlantState s) {
  return fabsf(s.x) <= 2.4F && fabsf(s.theta) <= 0.20943951F;
}

int plant_fallen(PlantState s) {
  return !(fabsf(s.theta) < 1.5707963F); /* NaN has fallen too */
}
