"""Plain DFlash: every slot proposes by itself. Sources: arXiv 2602.06036; z-lab's reference implementation."""
