"""Directed graphs: node -> {next node: length}."""


def shortest(graph, start, goal):
    """[length, [nodes]] of a shortest way, by name where two are equal; None if there is none."""
    queue = [[0, [start]]]
    done = set()
    while queue:
        queue.sort()
        length, way = queue.pop(0)
        node = way[-1]
        if node == goal:
            return [length, way]
        if node in done:
            continue
        done.add(node)
        for other, step in graph.get(node, {}).items():
            if other not in done:
                queue.append([length + step, [*way, other]])
    return None


def reachable(graph, start, most):
    """Nodes within ``most`` steps of the start, sorted; the start is one of them."""
    seen = {start}
    front = [start]
    for _ in range(most):
        front = [other for node in front for other in graph.get(node, {}) if other not in seen]
        seen.update(front)
    return sorted(seen)


def order(graph):
    """Nodes so that every edge leads forward, by name where several may come next; ValueError for
    a circle."""
    nodes = set(graph) | {other for edges in graph.values() for other in edges}
    entering = dict.fromkeys(nodes, 0)
    for edges in graph.values():
        for other in edges:
            entering[other] += 1
    result = []
    while len(result) < len(nodes):
        free = sorted(n for n in nodes if entering[n] == 0 and n not in result)
        if not free:
            raise ValueError("the graph has a circle")
        result.append(free[0])
        for other in graph.get(free[0], {}):
            entering[other] -= 1
    return result
