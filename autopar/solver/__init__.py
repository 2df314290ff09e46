"""The planner: a graph, a mesh and a cluster as a problem, its solution, and the plan that it stands for.

setting      what is planned, and what the user has settled
demands      what the user's layout demands
candidates   what may be decided
routes       the steps of conversions, found once for all tensors that are cut alike
tables       their prices, as tables over pairs of layouts
totals       the seconds of a step, from sums over everything that is decided
model        sets, variables, constraints, objective: stated, then built
search       the solution
decode       the plan
experts      the strategies of experts on this mesh
refusals     what is said where there is no plan
solve        all of it: `solve_plan`
"""
